"""What a reader of files is to the rest of the house: rows in blocks, each read by itself, as columns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from choros.errors import BadData
from choros.types import Array

Columns = Mapping[str, Any]  # by name, arrays whose first axis is the rows; objects for text and bytes


class Table(Protocol):
    """A data set in files."""

    @property
    def name(self) -> str:
        """What to call it in an error."""
        ...

    @property
    def files(self) -> list[str]:
        """Their paths."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """Of each block, its rows."""
        ...

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a block's rows in order, in parts; ``wanted=None`` is every column."""
        ...

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first rows of all, 32 or fewer."""
        ...

    def where(self, block: int) -> str:
        """Return in which file a block is, for errors."""
        ...

    def names(self) -> list[tuple[str, list[str]]]:
        """Return each file and its columns, where that can be told without reading the rows."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return in JSON's terms what ``reopen`` makes this table from again, without reading any file."""
        ...


def find_files(where: Any) -> list[str]:
    """Return the files that a path, a pattern, a directory or a list of them means, in a fixed order.

    Args:
        where: str, Path or a list of them. A directory means all files in it, but for those that begin with a dot or
            an underscore.

    Returns:
        Absolute paths: those of a pattern or a directory sorted, those of a list in its own order.

    Raises:
        BadData: nothing is there.
    """
    if isinstance(where, list | tuple):
        if not where:
            raise BadData("No files were named: give at least one path.")
        return [path for part in where for path in find_files(part)]
    try:
        path = os.path.abspath(os.fspath(where))
    except TypeError:
        raise BadData(f"A file was expected, not {where!r}: give a path, a pattern or a list of them.") from None
    if os.path.isdir(path):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        found = sorted(file for file in found if not os.path.basename(file).startswith((".", "_")))
    else:
        found = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path)))
    if not found:
        raise BadData(f"There is no file at {path}.")
    return found


def stamp(path: str) -> list[int]:
    """Return what changes when a file is written anew: its length and its time.

    Raises:
        BadData: the file is gone.
    """
    try:
        facts = os.stat(path)
    except OSError as error:
        raise BadData(f"{path} cannot be read any more: {error.strerror}.") from None
    return [facts.st_size, facts.st_mtime_ns]


def name_of(files: Sequence[str]) -> str:
    """Return what to call these files.

    Example:
        >>> name_of(["a.csv", "b.csv"])
        'a.csv and 1 more'
    """
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def stack(value: Any, what: str) -> Array:
    """Return a column as an array, one of lists or arrays of one length as an array with one more axis.

    Args:
        value: an array, or a sequence of equal arrays, as a user's function may return.
        what: how to call it in an error.

    Raises:
        BadData: text, bytes, or rows of different shapes.

    Example:
        >>> stack([np.zeros(2), np.ones(2)], "a").shape
        (2, 2)
    """
    array: Array = value
    if not isinstance(value, np.ndarray) or value.dtype == object:
        parts = [np.asarray(part) for part in value]
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise BadData(
                f"{what} has rows of different shapes ({sorted(shapes)[:3]}): give `decode` to make them equal."
            )
        array = np.stack(parts) if parts else np.empty(0)
    if array.dtype.kind not in "biufc" and "float" not in array.dtype.name:
        raise BadData(
            f"{what} holds {array.dtype.name} values, not numbers: leave it out, or turn it into numbers by `decode`."
        )
    return array
