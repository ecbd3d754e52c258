"""The interface of a file reader: rows in blocks, each read by itself, as columns."""

from __future__ import annotations

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np

from choros.errors import ChorosError, InvalidDataError, brief
from choros.types import Array

_T = TypeVar("_T")
ColumnChoice = Any  # a column's name, or lists, tuples and dicts of names
Columns = Mapping[str, Any]  # by name, arrays whose first axis is the rows; objects for text and bytes


class FileReader(ABC):
    """A data set in files: rows in blocks, each read by itself.

    Args:
        files: their paths.
        blocks: of each block, the number of its file, where it begins there, what else its reader wants, and last its
            rows; None looks into the files.

    Attributes:
        files: list of str.
        blocks: those that have rows.
        rows: of each block, its rows.
        names: each file that was looked into and its columns, where that can be told without reading the rows.
    """

    kind: ClassVar[str]  # what ``reopen`` knows it by
    unit: ClassVar[str]  # between a file's name and where a block begins

    def __init__(self, files: Sequence[str], blocks: list[list[int]] | None = None) -> None:
        self.files = list(files)
        self.names: list[tuple[str, list[str]]] = []
        if blocks is None:
            blocks = []
            for number, file in enumerate(self.files):
                with naming(file):
                    blocks += [[number, *block] for block in self.look(file)]
        self.blocks = [block for block in blocks if block[-1]]
        self.rows = [block[-1] for block in self.blocks]

    @property
    def name(self) -> str:
        """The table's name in errors."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @abstractmethod
    def look(self, file: str) -> Iterator[list[int]]:
        """Yield a file's blocks, without its number; note its columns in ``names``."""

    @abstractmethod
    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a block's rows in order, in parts; ``wanted=None`` is every column."""

    @abstractmethod
    def peek(self) -> Columns:
        """Return the first rows of all, 32 or fewer, with every column."""

    def where(self, block: int) -> str:
        """Return in which file a block is and where, for errors."""
        number, begin, *_ = self.blocks[block]
        return f"{self.files[number]}{self.unit} {begin}"

    def spec(self) -> dict[str, Any]:
        """Return in JSON's terms what ``reopen`` makes this table from again, without reading any file."""
        return {"kind": self.kind, "files": self.files, "blocks": self.blocks}


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Have whatever a library raises while it reads be an error that names the file.

    Args:
        what: str. The file, or where in it.

    Raises:
        InvalidDataError: it cannot be read.
    """
    try:
        yield
    except ChorosError:
        raise
    except Exception as error:  # a damaged file can have them raise anything
        raise InvalidDataError(f"{what} cannot be read, it may be damaged: {brief(error)}") from error


def readable(parts: Iterable[_T], what: str) -> Iterator[_T]:
    """Yield what a reader yields, ``naming`` what it reads."""
    with naming(what):
        yield from parts


def find_files(where: Any) -> list[str]:
    """Return the files that a path, a pattern, a directory or a list of them means, in a fixed order.

    Args:
        where: str, Path or a list of them. A directory means all files in it, but for those that begin with a dot or
            an underscore.

    Returns:
        Absolute paths: those of a pattern or a directory sorted, those of a list in its own order.

    Raises:
        InvalidDataError: nothing is there.
    """
    if isinstance(where, list | tuple):
        if not where:
            raise InvalidDataError("No files were named: give at least one path.")
        return [path for part in where for path in find_files(part)]
    try:
        path = os.path.abspath(os.fspath(where))
    except TypeError:
        raise InvalidDataError(
            f"A file was expected, not {where!r}: give a path, a pattern or a list of them."
        ) from None
    if os.path.isdir(path):
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        paths = sorted(file for file in paths if not os.path.basename(file).startswith((".", "_")))
    else:
        paths = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path)))
    if not paths and "://" in str(where):
        raise InvalidDataError(
            f"{where} is in an object store, and only files are read: mount the store as a folder (s3fs, gcsfuse), or "
            "give batches that a library reads from it: a generator, a tf.data.Dataset or a PyTorch DataLoader."
        )
    if not paths:
        raise InvalidDataError(f"There is no file at {path}.")
    return paths


def stamp(path: str) -> list[int]:
    """Return what changes when a file is written anew: its length and its time.

    Raises:
        InvalidDataError: the file is gone.
    """
    try:
        facts = os.stat(path)
    except OSError as error:
        raise InvalidDataError(f"{path} cannot be read any more: {error.strerror}.") from None
    return [facts.st_size, facts.st_mtime_ns]


def stack(value: Any, what: str) -> Array:
    """Return a column as an array, one of lists or arrays of one length as an array with one more axis.

    Args:
        value: an array, or a sequence of equal arrays, as a user's function may return.
        what: how to call it in an error.

    Raises:
        InvalidDataError: text, bytes, or rows of different shapes.

    Example:
        >>> stack([np.zeros(2), np.ones(2)], "a").shape
        (2, 2)
    """
    array: Array = value
    if not isinstance(value, np.ndarray) or value.dtype == object:
        parts = [np.asarray(part) for part in value]
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise InvalidDataError(
                f"{what} has rows of different shapes ({sorted(shapes)[:3]}): give `decode` to make them equal."
            )
        array = np.stack(parts) if parts else np.empty(0)
    if array.dtype.kind not in "biufc" and "float" not in array.dtype.name:
        raise InvalidDataError(
            f"{what} holds {array.dtype.name} values, not numbers: leave it out, or turn it into numbers by `decode`."
        )
    return array
