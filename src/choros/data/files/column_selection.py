"""The choice of columns for the inputs, the targets and the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from choros.data.files.reader import ColumnChoice, Columns, stack
from choros.data.tree import leaves
from choros.errors import InvalidDataError, counted
from choros.types import Array


class ColumnSpec:
    """One array of a batch: a column, or several concatenated columns.

    Args:
        names: the name of one column, whose rows may have any shape. Or a list of columns with at most one axis a row.
    """

    def __init__(self, names: str | Sequence[str]) -> None:
        self.names = [names] if isinstance(names, str) else list(names)
        self.single = isinstance(names, str)

    def of(self, columns: Columns, rows: int) -> Array:
        """Return this array for columns of ``rows`` rows: one column, or several of shape (rows, features).

        Raises:
            InvalidDataError: a column is missing, holds no numbers, has another number of rows, or has too many axes
                to be concatenated.
        """
        parts = self._parts(columns, rows)
        if self.single:
            return parts[0]
        return np.concatenate(parts, axis=1)

    def fitting(self, columns: Columns, rows: int, like: Array) -> Array:
        """Return this array in C order, with the row shape and dtype of the first rows.

        Args:
            columns: the columns by name.
            rows: int. Number of rows.
            like: some of the first rows.

        Raises:
            InvalidDataError: the rows have another shape, or are not integers although the first rows are.
        """
        parts = self._parts(columns, rows)
        # Two passes over contiguous memory take a quarter of the time of copying each column into rows.
        joined = parts[0] if self.single else np.concatenate([part.T for part in parts]).T
        if joined.shape[1:] != like.shape[1:]:
            raise InvalidDataError(
                f"{self.names[0]!r} has rows of shape {joined.shape[1:]}, and the first ones {like.shape[1:]}."
            )
        if joined.dtype.kind not in "biu" and like.dtype.kind in "biu":
            raise InvalidDataError(
                f"{self.names[0]!r} has fractions or missing values, and whole numbers in the first rows: give "
                "fractions everywhere (types={'a': 'double'} for CSV), or make them so in decode."
            )
        return np.ascontiguousarray(joined, like.dtype)

    def _parts(self, columns: Columns, rows: int) -> list[Array]:
        """Return the columns as arrays; several columns have two axes each."""
        parts = [stack(get(columns, name), f"The column {name!r}") for name in self.names]
        if wrong := [len(part) for part in parts if len(part) != rows]:
            raise InvalidDataError(f"decode gave {counted(wrong[0], 'row')} for {rows}: it must give one for each.")
        if self.single:
            return parts
        wide = [part[:, None] if part.ndim == 1 else part for part in parts]
        if too_deep := [name for name, part in zip(self.names, wide, strict=True) if part.ndim != 2]:
            raise InvalidDataError(
                f"The column {too_deep[0]!r} has more than one axis a row: give it by itself, not in a list."
            )
        return wide


def get(columns: Columns, name: str) -> Any:
    """Return a column.

    Raises:
        InvalidDataError: there is no column with this name.
    """
    if name not in columns:
        raise InvalidDataError(f"There is no column {name!r}: there are {', '.join(map(repr, columns))}.")
    return columns[name]


def check_choice(choice: ColumnChoice, name: str) -> None:
    """Refuse a choice that is not a name, list of names, or dict of them.

    Raises:
        InvalidDataError: the choice is invalid.

    Example:
        >>> check_choice(3, "y")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        choros.errors.InvalidDataError: y=3: give the name of a column, a list of names (side by side), or a dict ...
    """
    valid = choice is None or isinstance(choice, str) or _is_names(choice)
    if isinstance(choice, Mapping):
        valid = bool(choice) and all(isinstance(part, str) or _is_names(part) for part in choice.values())
    if not valid:
        raise InvalidDataError(
            f"{name}={choice!r}: give the name of a column, a list of names (side by side), or a dict of those."
        )


def _is_names(choice: ColumnChoice) -> bool:
    return isinstance(choice, list | tuple) and bool(choice) and all(isinstance(name, str) for name in choice)


def leaf_tree(choice: ColumnChoice) -> Any:
    """Return the choice with a ``ColumnSpec`` for each array.

    Example:
        >>> leaf_tree({"wide": ["a", "b"]})["wide"].names
        ['a', 'b']
    """
    if choice is None:
        return None
    if isinstance(choice, Mapping):
        return {str(key): ColumnSpec(part) for key, part in choice.items()}
    return ColumnSpec(choice)


def all_names(*choices: ColumnChoice) -> list[str]:
    """Return the names of all chosen columns, without duplicates.

    Example:
        >>> all_names(["a", "b"], "c", None)
        ['a', 'b', 'c']
    """
    trees = [leaf_tree(choice) for choice in choices]
    return list(dict.fromkeys(name for tree in trees for _, leaf in leaves(tree) for name in leaf.names))
