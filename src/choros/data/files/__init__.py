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
    r"""Create a source of rows in files, to pass to ``Trainer.fit`` as ``x``.

    Each worker reads the files. Memory holds only the blocks that are being decoded. A block is a row group of Parquet,
    a record batch of Arrow, about 4 MB of another format, or a whole compressed file. Blocks are permuted, then rows
    within pools of up to 64 blocks (at most 4 M rows). Row groups of about 10,000 rows therefore give a good order. The
    workers of a machine share the decoding: each block is decoded once into an anonymous temporary file, which later
    epochs and other calls of ``fit`` read.

    Args:
        where: a path, a glob pattern, a directory, or a list of them.
        x: a column, a list of columns (concatenated as features), or a dict of those for a model with several inputs. A
            column is a data set of HDF5 (by its path) or a feature of tf.train.Example in TFRecord. It may hold arrays
            of one shape. Missing numbers become NaN. For integer columns this requires that the file's metadata or the
            first 4 MB of a CSV show missing values; else use ``types`` or ``decode``. Defaults to all columns except
            ``y`` and ``sample_weight``.
        y: the same. Defaults to None.
        sample_weight: the same. Defaults to None.
        format: "parquet", "arrow", "csv", "hdf5" or "tfrecord". By default it follows from the extension of the files.
        decode: a function from a dict of columns to a dict of columns, for text, bytes or images. It runs in the
            workers, once for each row. The result for a row must not depend on the other rows.
        spill_dir: str. A directory with space for all decoded rows. Defaults to the temporary directory (``TMPDIR``).
        delimiter: the delimiter of CSV. A quoted field may contain it, but no newline. Defaults to ",".
        types: the types of CSV columns by name ("double", "int32", "string"). By default they are inferred
            from the first 4 MB.

    Raises:
        InvalidDataError: there is no file, no such column, or the library that reads the format is missing.

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
    """Return the reader that ``FileReader.spec`` described."""
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
