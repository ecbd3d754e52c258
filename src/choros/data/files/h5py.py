"""HDF5 files, read by h5py. A block has about 4 MB of rows of all data sets in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from choros.data.files.reader import Columns, FileReader
from choros.errors import InvalidDataError

try:
    import h5py
except ImportError as error:
    raise InvalidDataError("HDF5 files are read by h5py, which is missing: pip install h5py.") from error

_BLOCK = 1 << 22  # bytes of a block


class Hdf5Table(FileReader):
    """HDF5 files whose data sets have one row for each sample. Several files are concatenated.

    The name of a data set in a group is its path (``train/x``). Data sets whose number of rows is not the most common
    one are ignored. A block has the index of its file, the first row in it, and the number of rows.
    """

    kind, unit = "hdf5", " from row"

    def __init__(self, files: Sequence[str], blocks: list[list[int]] | None = None) -> None:
        super().__init__(files, blocks)
        self._file_rows = Counter[int]()  # rows of each file, summed once instead of at every read
        for (number, *_), rows in zip(self.blocks, self.rows, strict=True):
            self._file_rows[number] += rows

    def look(self, file: str) -> Iterator[list[int]]:
        """Yield the blocks of a file as [first row, number of rows]."""
        rows, width, names = _look(file)
        self.names.append((file, names))
        step = max(1, _BLOCK // max(1, width))
        for top in range(0, rows, step):
            yield [top, min(step, rows - top)]

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the rows of a block."""
        yield self._get(block, wanted)

    def peek(self) -> Columns:
        """Return the first rows."""
        return {name: column[:32] for name, column in self._get(0, None).items()}

    def _get(self, block: int, wanted: Sequence[str] | None) -> Columns:
        number, top, rows = self.blocks[block]
        with h5py.File(self.files[number], "r") as file:
            sets = _sets(file, self._file_rows[number])
            names = sets if wanted is None else [name for name in wanted if name in sets]
            return {name: np.asarray(sets[name][top : top + rows]) for name in names}


def _look(path: str) -> tuple[int, int, list[str]]:
    """Return the number of rows of a file, the bytes of a row, and the names of its columns."""
    try:
        with h5py.File(path, "r") as file:
            datasets = _sets(file, None)
            lengths = [len(part) for part in datasets.values()]
            if not lengths:
                raise InvalidDataError(f"{path} holds no data set with rows.")
            rows = max(set(lengths), key=lengths.count)  # the most common
            parts = _sets(file, rows)
            width = sum(int(np.prod(part.shape[1:])) * part.dtype.itemsize for part in parts.values())
            return rows, width, list(parts)
    except OSError as error:
        raise InvalidDataError(f"{path} cannot be read as HDF5: {error}.") from error


def _sets(file: Any, rows: int | None) -> dict[str, Any]:
    """Return the data sets with this number of rows, by their paths; None for any number."""
    datasets: dict[str, Any] = {}

    def add_dataset(name: str, part: object) -> None:
        if isinstance(part, h5py.Dataset) and part.ndim and rows in (None, len(part)):
            datasets[name] = part

    file.visititems(add_dataset)
    return datasets
