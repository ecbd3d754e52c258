"""Parquet, Arrow and CSV files, read by pyarrow: a block is a row group, a record batch, or some megabytes of text."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np

from choros.data.stored.table import Columns, name_of
from choros.errors import BadData
from choros.types import Array

try:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError as error:
    raise BadData("Parquet, Arrow and CSV files are read by pyarrow, which is missing: pip install pyarrow.") from error

_PART = 1 << 16  # rows that are decoded at once
_TEXT = 1 << 22  # bytes of a block of CSV


class ParquetTable:
    """Parquet files; a block is a row group.

    Args:
        files: their paths.
        groups: of each block, the number of its file, of its row group there, and its rows; None looks into the files.
        gaps: the columns that have missing values anywhere; such whole numbers become fractions everywhere.
    """

    def __init__(self, files: Sequence[str], groups: list[list[int]] | None = None, gaps: Sequence[str] = ()) -> None:
        self.files, self._gaps, self._names = list(files), set(gaps), list[tuple[str, list[str]]]()
        if groups is None:
            groups = []
            for number, file in enumerate(self.files):
                whole = _open(pyarrow.parquet.ParquetFile, file)
                facts = [whole.metadata.row_group(i) for i in range(whole.metadata.num_row_groups)]
                groups += [[number, i, fact.num_rows] for i, fact in enumerate(facts)]
                self._names.append((file, whole.schema_arrow.names))
                self._gaps |= {name for fact in facts for name in _gaps(fact)}
        self._groups = [group for group in groups if group[2]]
        self.rows = [group[2] for group in self._groups]
        self._open = threading.local()
        self.name = name_of(self.files)

    def _file(self, number: int) -> Any:
        """One open file a thread: a reader is not for several, and its footer is long."""
        if getattr(self._open, "number", None) != number:
            self._open.number = number
            self._open.file = pyarrow.parquet.ParquetFile(self.files[number], memory_map=True, pre_buffer=False)
        return self._open.file

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a row group in parts."""
        number, group, _ = self._groups[block]
        file = self._file(number)
        names = None if wanted is None else [name for name in wanted if name in file.schema_arrow.names]
        for batch in file.iter_batches(_PART, row_groups=[group], columns=names, use_threads=False):
            yield columns(batch, self._gaps)

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first rows."""
        number, group, _ = self._groups[0]
        return columns(next(self._file(number).iter_batches(32, row_groups=[group])), self._gaps)

    def where(self, block: int) -> str:
        """Return the file and the row group."""
        number, group, _ = self._groups[block]
        return f"{self.files[number]}, row group {group}"

    def names(self) -> list[tuple[str, list[str]]]:
        """Return each file and its columns."""
        return self._names

    def spec(self) -> dict[str, Any]:
        """Return the files and the row groups."""
        return {"kind": "parquet", "files": self.files, "groups": self._groups, "gaps": sorted(self._gaps)}


class ArrowTable:
    """Arrow's own files (IPC, Feather), mapped; a block is a record batch.

    Args:
        files: their paths.
        batches: of each block, the number of its file, of its batch there, and its rows; None looks into the files.
        gaps: the columns that have missing values anywhere; such whole numbers become fractions everywhere.
    """

    def __init__(self, files: Sequence[str], batches: list[list[int]] | None = None, gaps: Sequence[str] = ()) -> None:
        self.files, self._gaps, self._names = list(files), set(gaps), list[tuple[str, list[str]]]()
        if batches is None:
            batches = []
            for number, file in enumerate(self.files):
                reader = _open(pa.ipc.open_file, _open(pa.memory_map, file))
                self._names.append((file, reader.schema.names))
                for i in range(reader.num_record_batches):
                    batch = reader.get_batch(i)
                    batches.append([number, i, batch.num_rows])
                    self._gaps |= {n for n, c in zip(batch.schema.names, batch.columns, strict=True) if c.null_count}
        self._batches = [batch for batch in batches if batch[2]]
        self.rows = [batch[2] for batch in self._batches]
        self.name = name_of(self.files)

    def _get(self, block: int) -> Any:
        number, batch, _ = self._batches[block]
        return pa.ipc.open_file(pa.memory_map(self.files[number])).get_batch(batch)

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a record batch in parts."""
        batch = self._get(block)
        if wanted is not None:
            batch = batch.select([name for name in wanted if name in batch.schema.names])
        for top in range(0, batch.num_rows, _PART):
            yield columns(batch.slice(top, _PART), self._gaps)

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first rows."""
        return columns(self._get(0).slice(0, 32), self._gaps)

    def where(self, block: int) -> str:
        """Return the file and the record batch."""
        number, batch, _ = self._batches[block]
        return f"{self.files[number]}, record batch {batch}"

    def names(self) -> list[tuple[str, list[str]]]:
        """Return each file and its columns."""
        return self._names

    def spec(self) -> dict[str, Any]:
        """Return the files and the batches."""
        return {"kind": "arrow", "files": self.files, "batches": self._batches, "gaps": sorted(self._gaps)}


class CsvTable:
    """CSV files with one line of names, one row a line; a block is 4 MB of lines, or a whole compressed file.

    A field that is quoted may hold commas but no ends of lines.

    Args:
        files: their paths.
        delimiter: between fields.
        stretches: of each block, the number of its file, where it begins and ends there, and its rows; None looks into
            the files.
        kinds: by name, the type of columns, in pyarrow's words. Others are what the first file's first megabytes look
            like.
        guessed: whether ``kinds`` has them all.
    """

    def __init__(
        self,
        files: Sequence[str],
        delimiter: str = ",",
        stretches: list[list[int]] | None = None,
        kinds: dict[str, str] | None = None,
        guessed: bool = False,
    ) -> None:
        self.files, self.delimiter = list(files), delimiter
        self.name = name_of(self.files)
        if stretches is None:
            stretches = [[i, *part] for i, file in enumerate(self.files) for part in self._stretches(file)]
        self._stretch = [part for part in stretches if part[3]]
        self.rows = [part[3] for part in self._stretch]
        self._kinds = kinds or {}
        self._names = [] if guessed else [(file, self._header(file)) for file in self.files]
        if self._stretch and not guessed:
            self._kinds = self._guess(self._kinds)

    def _stretches(self, file: str) -> Iterator[list[int]]:
        """Yield the stretches of whole lines of a file after its first one, and how many lines each has."""
        if _packed(file):
            with _open(pa.input_stream, file) as stream:
                yield [0, -1, _lines(stream.read()) - 1]
            return
        with open(file, "rb") as stream:
            begin = len(stream.readline())
            end = os.path.getsize(file)
            while begin < end:
                stream.seek(begin)
                text = stream.read(_TEXT)
                if begin + len(text) < end:
                    text = text[: text.rfind(b"\n") + 1] or text + stream.readline()
                yield [begin, begin + len(text), _lines(text)]
                begin += len(text)

    def _header(self, file: str) -> list[str]:
        with _open(pa.input_stream, file) as stream:
            line = stream.read(_TEXT).split(b"\n", 1)[0]
        options = pyarrow.csv.ParseOptions(delimiter=self.delimiter)
        names: list[str] = pyarrow.csv.read_csv(pa.BufferReader(line + b"\n"), parse_options=options).schema.names
        return names

    def _guess(self, given: dict[str, str]) -> dict[str, str]:
        """Return what the first stretch's values look like; a column without any is one of missing numbers."""
        found = {field.name: str(field.type) for field in self._parse(0, given).schema}
        return {name: "double" if kind == "null" else kind for name, kind in found.items()}

    def _parse(self, block: int, kinds: dict[str, str]) -> Any:
        number, begin, end, rows = self._stretch[block]
        path = self.files[number]
        if end < 0:
            source = pa.input_stream(path)
        else:
            with open(path, "rb") as stream:
                names = stream.readline()
                stream.seek(begin)
                source = pa.BufferReader(names + stream.read(end - begin))
        try:
            with source:
                table = pyarrow.csv.read_csv(
                    source,
                    parse_options=pyarrow.csv.ParseOptions(delimiter=self.delimiter),
                    convert_options=pyarrow.csv.ConvertOptions(
                        column_types={name: pa.type_for_alias(kind) for name, kind in kinds.items()}
                    ),
                )
        except pa.ArrowInvalid as error:
            hint = ". Where the first rows look like another type, give types, like types={'a': 'double'}"
            raise BadData(
                f"{path} cannot be read as CSV: {error}{hint if 'conversion' in str(error) else ''}."
            ) from error
        if table.num_rows != rows:
            raise BadData(
                f"{path} has {table.num_rows} rows in {rows} lines: a quoted field may not hold the end of a line."
            )
        return table

    def where(self, block: int) -> str:
        """Return the file and the first byte."""
        number, begin, _, _ = self._stretch[block]
        return f"{self.files[number]} from byte {begin}"

    def names(self) -> list[tuple[str, list[str]]]:
        """Return each file and its columns."""
        return self._names

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a block in parts."""
        yield from map(columns, self._parse(block, self._kinds).to_batches(_PART))

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first rows."""
        return columns(self._parse(0, self._kinds).slice(0, 32))

    def spec(self) -> dict[str, Any]:
        """Return the files, their stretches and the columns' types."""
        return {
            "kind": "csv",
            "files": self.files,
            "delimiter": self.delimiter,
            "stretches": self._stretch,
            "kinds": self._kinds,
            "guessed": True,
        }


def columns(batch: Any, gaps: Container[str] = ()) -> dict[str, Array]:
    """Return a pyarrow table's or batch's columns as numpy arrays.

    Missing numbers become NaN, and whole numbers fractions in columns with ``gaps``; lists of one length become an
    axis; text and bytes become objects.

    Raises:
        BadData: two columns have one name.
    """
    names = batch.schema.names
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise BadData(f"There are two columns {twice[0]!r}: give each a name of its own.")
    found = {name: _column(batch.column(i)) for i, name in enumerate(names)}
    return {n: a.astype(np.float64) if n in gaps and a.dtype.kind in "biu" else a for n, a in found.items()}


def _gaps(group: Any) -> Iterator[str]:
    """Yield the columns of a row group that miss values, as far as the file tells."""
    for i in range(group.num_columns):
        column = group.column(i)
        if column.statistics is not None and column.statistics.null_count:
            yield column.path_in_schema.split(".")[0]


def _column(column: Any) -> Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(column)
    if isinstance(column, pa.ExtensionArray) and hasattr(column, "to_numpy_ndarray"):
        tensors: Array = column.to_numpy_ndarray()
        return tensors
    if pa.types.is_dictionary(kind):
        return _column(column.dictionary_decode())
    if pa.types.is_primitive(kind) and column.null_count and not pa.types.is_floating(kind):
        column = column.cast(pa.float64(), safe=False)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _lists(column: Any) -> Array:
    """Return lists as rows, where all are as long as the first; else as objects."""
    values = _column(column.flatten())
    if len(column) and not column.null_count and values.dtype != object:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False) if not _fixed(column) else None
        if lengths is None or (lengths == lengths[0]).all():
            return values.reshape(len(column), -1, *values.shape[1:])
    rows = np.empty(len(column), object)
    for i, part in enumerate(column):
        rows[i] = np.asarray(part.as_py())
    return rows


def _fixed(column: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(column.type))


def _open(opener: Any, source: Any) -> Any:
    try:
        return opener(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadData(f"{source} cannot be read: {error}") from error


def _packed(file: str) -> bool:
    return file.endswith((".gz", ".bz2", ".zst", ".lz4", ".br"))


def _lines(text: bytes) -> int:
    """Return how many lines of a text are rows: empty ones are none, as for pyarrow."""
    if text.startswith((b"\n", b"\r\n")) or b"\n\n" in text or b"\n\r\n" in text:
        return sum(bool(line) for line in text.splitlines())
    return text.count(b"\n") + bool(text and not text.endswith(b"\n"))
