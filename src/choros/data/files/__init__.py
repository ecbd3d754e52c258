"""Data in files: Parquet, Arrow, CSV, HDF5 and TFRecord, as a source for ``Trainer.fit``."""

from __future__ import annotations

from typing import Any

from choros.data.files.reader import FileReader, find_files
from choros.data.files.source import Decode, FileSource
from choros.errors import InvalidDataError
from choros.types import ArrayTree

__all__ = ["FileSource", "files", "reopen"]

_ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "csv": (".csv", ".csv.gz", ".csv.bz2", ".csv.zst"),
    "hdf5": (".h5", ".hdf5"),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz"),
}


def files(
    where: object,
    x: ArrayTree = None,
    y: ArrayTree = None,
    sample_weight: ArrayTree = None,
    *,
    format: str | None = None,
    decode: Decode | None = None,
    spill_dir: str | None = None,
    delimiter: str = ",",
    types: dict[str, str] | None = None,
) -> FileSource:
    r"""Rows in files, as ``x`` of ``Trainer.fit``: each worker reads them, and memory holds only what is being decoded.

    The rows lie in blocks: a row group of Parquet, a record batch of Arrow, some 4 MB of the others, or a whole file
    where it is compressed. They are gone through by permuted blocks, and by permuted rows within up to 64 of them (at
    most 4 M rows); so write row groups of some 10,000 rows. The workers of a machine decode each block once, together,
    into a file without a name, which later epochs and other ``fit``s read.

    Args:
        where: a path, a pattern, a directory, or a list of them.
        x: a column, a list of columns (side by side, as features), or a dict of those, for a model with several inputs.
            Defaults to all columns but ``y`` and ``sample_weight``. A column is a data set in HDF5 (by its path) and a
            feature of tf.train.Example in TFRecord; it may hold arrays of one shape. Missing numbers become NaN (in
            a column of whole numbers if the file tells so, or the first 4 MB of a CSV do; else give types or decode).
        y: the same. Defaults to None.
        sample_weight: the same. Defaults to None.
        format: "parquet", "arrow", "csv", "hdf5" or "tfrecord". Defaults to what the files' names end in.
        decode: from a dict of columns to a dict of columns, where files hold text, bytes or images. It runs in the
            workers, once a row, and must give each row the same whichever rows come with it.
        spill_dir: str. A directory with room for all decoded rows. Defaults to that of temporary files (``TMPDIR``).
        delimiter: of CSV. A quoted field may hold it, but no end of a line.
        types: of CSV, by name the type of columns ("double", "int32", "string"). Defaults to what the first 4 MB look
            like.

    Raises:
        InvalidDataError: there is no file, no such column, or the library that reads them is missing.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "a.csv")
        ...     with open(path, "w") as file:
        ...         _ = file.write("u,v,label\n1,2,0\n3,4,1\n")
        ...     source = files(path, y="label")
        >>> source.rows, source.sample(32).x.tolist()
        (2, [[1, 2], [3, 4]])
    """
    paths = find_files(where)
    kind = _kind(paths) if format is None else format
    if kind not in _ENDINGS:
        if format is not None:
            raise InvalidDataError(f"format={format!r}: give one of {', '.join(map(repr, _ENDINGS))}.")
        raise InvalidDataError(
            f"{paths[0]} has a name that tells no format: give format=, one of {', '.join(map(repr, _ENDINGS))}."
        )
    options = {"delimiter": delimiter, "kinds": types} if kind == "csv" else {}
    return FileSource(reopen({"kind": kind, "files": paths, **options}), x, y, sample_weight, decode, spill_dir)


def _kind(paths: list[str]) -> str:
    kinds = {next((kind for kind, ends in _ENDINGS.items() if path.endswith(ends)), path): path for path in paths}
    if len(kinds) > 1:
        raise InvalidDataError(
            f"There are files of several formats ({', '.join(list(kinds.values())[:3])}): give those of one."
        )
    return next(iter(kinds))


def reopen(spec: dict[str, Any]) -> FileReader:
    """Return the table that ``FileReader.spec`` described."""
    kind, parts = spec["kind"], {name: value for name, value in spec.items() if name != "kind"}
    if kind == "hdf5":
        from choros.data.files.h5py import Hdf5Table

        return Hdf5Table(**parts)
    if kind == "tfrecord":
        from choros.data.files.tfrecord import RecordTable

        return RecordTable(**parts)
    from choros.data.files import pyarrow

    kinds: dict[str, Any] = {"parquet": pyarrow.ParquetTable, "arrow": pyarrow.ArrowTable, "csv": pyarrow.CsvTable}
    table: FileReader = kinds[kind](**parts)
    return table
