"""The interface of a file reader. Rows are in blocks, and each block is read separately as columns."""

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
Columns = Mapping[str, Any]  # arrays by name, whose first axis is the rows; object arrays for text and bytes


class FileReader(ABC):
    """A data set in files. Rows are in blocks, and each block is read separately.

    Args:
        files: paths of the files.
        blocks: for each block: the index of its file, its start in the file, other values of the reader, and last the
            number of rows. By default they are read from the files.

    Attributes:
        files: list of str.
        blocks: the blocks that have rows.
        rows: number of rows of each block.
        names: pairs of a file and its column names, for formats that provide names without reading rows.
    """

    kind: ClassVar[str]  # the name of the format in ``reopen``
    unit: ClassVar[str]  # the text between a file's name and the start of a block in error messages

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
        """The name of the data set in error messages."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @abstractmethod
    def look(self, file: str) -> Iterator[list[int]]:
        """Yield a file's blocks without the index of the file; append its columns to ``names`` if they are known."""

    @abstractmethod
    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the rows of a block in order, in parts. ``wanted=None`` selects every column."""

    @abstractmethod
    def peek(self) -> Columns:
        """Return the first rows of the data set, 32 or fewer, with every column."""

    def where(self, block: int) -> str:
        """Return the file and start of a block, for error messages."""
        number, begin, *_ = self.blocks[block]
        return f"{self.files[number]}{self.unit} {begin}"

    def spec(self) -> dict[str, Any]:
        """Return a description in JSON types. ``reopen`` creates the reader from it without reading a file."""
        return {"kind": self.kind, "files": self.files, "blocks": self.blocks}


@contextmanager
def naming(description: str) -> Iterator[None]:
    """Convert exceptions of a library that reads a file to an error that names the file.

    Args:
        description: str. The file, or a position in it.

    Raises:
        InvalidDataError: the file cannot be read.
    """
    try:
        yield
    except ChorosError:
        raise
    except Exception as error:  # for a damaged file a library may raise any exception
        raise InvalidDataError(f"{description} cannot be read, it may be damaged: {brief(error)}") from error


def readable(parts: Iterable[_T], description: str) -> Iterator[_T]:
    """Yield the items of a reader, with errors as in ``naming``."""
    with naming(description):
        yield from parts


def find_files(where: Any) -> list[str]:
    """Return the files of a path, a glob pattern, a directory or a list of them, in a fixed order.

    Args:
        where: str, Path or a list of them. For a directory, all files in it and its subdirectories are returned, except
            files whose names begin with a dot or an underscore.

    Returns:
        Absolute paths. Those of a pattern or a directory are sorted; a list keeps its order.

    Raises:
        InvalidDataError: no file was found, or ``where`` has another type.
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
    """Return the size and modification time of a file, which change when it is written again.

    Raises:
        InvalidDataError: the file cannot be read any more.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidDataError(f"{path} cannot be read any more: {error.strerror}.") from None
    return [status.st_size, status.st_mtime_ns]


def stack(value: Any, description: str) -> Array:
    """Return a column as a numeric array. Rows that are lists or arrays of one shape are stacked.

    Args:
        value: an array, or a sequence of arrays of equal shape, as a user's function may return.
        description: name of the column in error messages.

    Raises:
        InvalidDataError: the column holds text or bytes, or rows of different shapes.

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
                f"{description} has rows of different shapes ({sorted(shapes)[:3]}): give `decode` to make them equal."
            )
        array = np.stack(parts) if parts else np.empty(0)
    if array.dtype.kind not in "biufc" and "float" not in array.dtype.name:
        raise InvalidDataError(
            f"{description} holds {array.dtype.name} values, not numbers: leave it out, or turn it into numbers by "
            "`decode`."
        )
    return array
