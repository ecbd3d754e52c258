"""HDF5 files, read by h5py: a block is some megabytes of rows of every data set in the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from choros.data.stored.table import Columns, name_of
from choros.errors import BadData

try:
    import h5py
except ImportError as error:
    raise BadData("HDF5 files are read by h5py, which is missing: pip install h5py.") from error

_BLOCK = 1 << 22  # bytes of a block


class Hdf5Table:
    """HDF5 files whose data sets have one row for each sample; several files follow each other.

    A data set in a group has its path for a name (``train/x``). Those with another number of rows than
    most are not part of the table.

    Args:
        files: their paths.
        rows_of: of each file, the rows; None looks into the files.
        step: rows of a block.
    """

    def __init__(self, files: Sequence[str], rows_of: Sequence[int] | None = None, step: int = 0) -> None:
        self.files = list(files)
        self.name = name_of(self.files)
        looked = [_look(file) for file in self.files] if rows_of is None or not step else []
        self._names = [(file, names) for file, (_, _, names) in zip(self.files, looked, strict=False)]
        self._rows_of = list(rows_of) if rows_of is not None else [rows for rows, _, _ in looked]
        self._step = step or max(1, _BLOCK // max(1, *(width for _, width, _ in looked)))
        self._blocks = [
            (number, top, min(self._step, rows - top))
            for number, rows in enumerate(self._rows_of)
            for top in range(0, rows, self._step)
        ]
        self.rows = [rows for _, _, rows in self._blocks]

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a block."""
        number, top, rows = self._blocks[block]
        yield self._get(number, top, rows, wanted)

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first rows."""
        number, top, rows = self._blocks[0]
        return self._get(number, top, min(32, rows), None)

    def _get(self, number: int, top: int, rows: int, wanted: Sequence[str] | None) -> Columns:
        with h5py.File(self.files[number], "r") as file:
            sets = _sets(file, self._rows_of[number])
            names = sets if wanted is None else [name for name in wanted if name in sets]
            return {name: np.asarray(sets[name][top : top + rows]) for name in names}

    def where(self, block: int) -> str:
        """Return the file and the first row."""
        number, top, _ = self._blocks[block]
        return f"{self.files[number]} from row {top}"

    def names(self) -> list[tuple[str, list[str]]]:
        """Return each file and its columns."""
        return self._names

    def spec(self) -> dict[str, Any]:
        """Return the files and how they are cut."""
        return {"kind": "hdf5", "files": self.files, "rows_of": self._rows_of, "step": self._step}


def _look(path: str) -> tuple[int, int, list[str]]:
    """Return how many rows a file has, the bytes of a row, and its columns."""
    try:
        with h5py.File(path, "r") as file:
            found = _sets(file, None)
            lengths = [len(part) for part in found.values()]
            if not lengths:
                raise BadData(f"{path} holds no data set with rows.")
            rows = max(set(lengths), key=lengths.count)  # the most common
            parts = _sets(file, rows)
            width = sum(int(np.prod(part.shape[1:])) * part.dtype.itemsize for part in parts.values())
            return rows, width, list(parts)
    except OSError as error:
        raise BadData(f"{path} cannot be read as HDF5: {error}.") from error


def _sets(file: Any, rows: int | None) -> dict[str, Any]:
    """Return the data sets of this many rows, by their paths."""
    found: dict[str, Any] = {}

    def visit(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset) and part.ndim and rows in (None, len(part)):
            found[name] = part

    file.visititems(visit)
    return found
