"""Files as a source of batches. Each block is decoded when it is needed, once for all workers and epochs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from choros.data.array_source import ArraySource
from choros.data.block_shuffle import BlockOrder, Rows
from choros.data.class_weights import check_class_weight, with_class_weight
from choros.data.conversion import to_floatx
from choros.data.files.column_selection import all_names, check_choice, leaf_tree
from choros.data.files.decode_cache import DecodeCache, form
from choros.data.files.reader import ColumnChoice, Columns, FileReader, naming, readable, stamp
from choros.data.permutation import permutation
from choros.data.sharding import pieces
from choros.data.tree import leaves, map_leaves
from choros.data.validation import check_batch
from choros.errors import InvalidDataError, counted
from choros.types import ArrayTree, Batch

Decode = Callable[[dict[str, Any]], Columns]


class FileSource:
    """Rows of files. Blocks are permuted, then rows within pools of up to 64 blocks.

    ``choros.files`` creates this source. Decoded rows are stored in an anonymous temporary file (``DecodeCache``), so
    memory holds only the blocks that are being decoded.

    Args:
        table: the reader.
        x: a column, a list of columns (concatenated) or a dict of those. Defaults to all except y and sample_weight.
        y, sample_weight: the same, or None.
        decode: a function from the columns of some rows to other columns, for text, bytes or images. The result for a
            row must not depend on the other rows.
        spill_dir: directory for decoded rows. Defaults to the directory for temporary files.
        floatx: dtype to which floats are converted. Defaults to ``keras.config.floatx()``.
        spill: path of a ``DecodeCache`` that another process has created.
        first: the first rows as ``(x, y, sample_weight)``, if they are known.
        class_weight: a dict from class index to weight, or None.

    Attributes:
        rows: int. Rows in a pass.
        first: the first rows, 32 or fewer, as ``(x, y, sample_weight)``.

    Raises:
        InvalidDataError: there are no rows, or a chosen column is missing or invalid.
    """

    rows: int
    indexed = True
    ahead = 0
    brings_targets = True

    def __init__(
        self,
        table: FileReader,
        x: ArrayTree = None,
        y: ArrayTree = None,
        sample_weight: ArrayTree = None,
        decode: Decode | None = None,
        spill_dir: str | None = None,
        floatx: str | None = None,
        spill: str | None = None,
        class_weight: Mapping[int, float] | None = None,
        first: tuple[ArrayTree, ArrayTree, ArrayTree] | None = None,
    ) -> None:
        for name, choice in (("x", x), ("y", y), ("sample_weight", sample_weight)):
            check_choice(choice, name)
        self.table, self.decode, self.spill_dir, self.class_weight = table, decode, spill_dir, class_weight
        self.starts: Rows = np.concatenate([[0], np.cumsum(table.rows, dtype=np.int64)]).astype(np.int64)
        self.rows = int(self.starts[-1])
        self._blocks: Rows = np.arange(len(table.rows))
        if not self.rows:
            raise InvalidDataError(f"{table.name} has no rows: give at least one.")
        self._stamps = [] if first else [stamp(file) for file in table.files]
        if floatx is None:
            import keras

            floatx = keras.config.floatx()
        self.floatx = floatx
        if first is None:
            x, first = self._look(x, y, sample_weight)
        self.choice, self.first = (x, y, sample_weight), first
        self._tree = leaf_tree(x), leaf_tree(y), leaf_tree(sample_weight)
        self._leaves = [leaf for _, leaf in leaves(self._tree)]
        self._forms = [form(array) for _, array in leaves(first)]
        self._spill: DecodeCache | None = None
        if spill is not None:
            self.join(spill)

    def __repr__(self) -> str:
        blocks = f"{len(self._blocks)} block{'s' * (len(self._blocks) != 1)}"
        return f"<choros.files {self.table.name}: {self.rows} row{'s' * (self.rows != 1)}, {blocks}>"

    def _look(self, x: ArrayTree, y: ArrayTree, sample_weight: ArrayTree) -> tuple[Any, Any]:
        """Return the columns of x, and the first rows as ``(x, y, sample_weight)``."""
        wanted = self._wanted(x, y, sample_weight)
        self._check_names(wanted or ())
        with naming(self.table.files[0]):
            columns = self.table.peek()
        decoded = self._decoded(columns)
        if x is None:
            others = set(all_names(y, sample_weight))
            x = [name for name in decoded if name not in others]
            if not x:
                raise InvalidDataError(f"{self.table.name} has no column for x beside those for y and sample_weight.")
        self._check_names(self._wanted(x, y, sample_weight) or ())
        tree = leaf_tree(x), leaf_tree(y), leaf_tree(sample_weight)
        rows, floatx = _count(columns), self.floatx
        return x, map_leaves(lambda leaf: to_floatx(leaf.of(decoded, rows), floatx), tree)

    def _check_names(self, wanted: Sequence[str]) -> None:
        for file, names in self.table.names:
            if lacking := [name for name in wanted if name not in names]:
                raise InvalidDataError(
                    f"There is no column {lacking[0]!r} in {file}: there are {', '.join(map(repr, names))}."
                )

    def check(self) -> None:
        """Refuse files that have changed since this source was created.

        Raises:
            InvalidDataError: a file has changed. The message contains its path.
        """
        # A changed file could have other rows at the positions that the workers compute.
        for file, recorded in zip(self.table.files, self._stamps, strict=False):
            if stamp(file) != recorded:
                raise InvalidDataError(f"{file} has changed since choros.files read it: call choros.files again.")

    def _wanted(self, *choices: ColumnChoice) -> list[str] | None:
        """Return the names of the columns to read; None (all) with ``decode`` or without a choice for x."""
        return None if self.decode is not None or choices[0] is None else all_names(*choices)

    def _decoded(self, columns: Columns) -> Columns:
        return columns if self.decode is None else self.decode(dict(columns))

    def join(self, path: str) -> None:
        """Use the decoded rows of another process of this machine: the ``path`` of its ``spill``."""
        self._spill = DecodeCache(path, len(self.table.rows), int(self.starts[-1]), self._forms)

    def spec(self, here: bool = True) -> dict[str, Any]:
        """Return a description in JSON types from which a worker creates this source. ``decode`` is sent separately.

        Args:
            here: whether the worker is on this machine; it then shares the decoded rows. Defaults to True.
        """
        spill = self.spill.path if here else None
        spec = {"table": self.table.spec(), "choice": self.choice, "floatx": self.floatx}
        return spec | {"spill": spill, "spill_dir": self.spill_dir}

    def with_class_weight(self, class_weight: Mapping[int, float]) -> FileSource:
        """Return a copy of this source with a weight for each class."""
        check_class_weight(class_weight, self.choice[1])
        weighted = self._copy()
        weighted.class_weight = class_weight
        return weighted

    def _copy(self) -> FileSource:
        self._spill = self.spill  # created before the copy, so that both use the same file
        return copy.copy(self)

    @property
    def spill(self) -> DecodeCache:
        """The decoded rows on disk, created at the first access."""
        if self._spill is None:
            self._spill = DecodeCache.create(len(self.table.rows), int(self.starts[-1]), self._forms, self.spill_dir)
        return self._spill

    def steps(self, batch_size: int) -> int:
        """Return the number of global batches in a pass: ``ceil(rows / batch_size)``."""
        return -(-self.rows // batch_size)

    def sample(self, batch_size: int) -> Batch:
        """Return the first rows, at most ``batch_size`` and at most 32."""
        x, y, weight = map_leaves(lambda a: a[:batch_size], self.first)
        rows = len(next(leaves(x))[1])
        return Batch(x, y, self._weighted(y, weight), rows=rows, total=rows)

    def part(self, rank: int, size: int, seed: int) -> FileSource:
        """Return one of ``size`` disjoint shards: every ``size``-th block of a permutation from ``seed``.

        Raises:
            InvalidDataError: there are fewer blocks than shards.
        """
        if len(self._blocks) < size:
            raise InvalidDataError(
                f"{self.table.name} has {counted(len(self._blocks), 'block')} (row groups, files), too few for {size} "
                "members of an ensemble: write more of them, or read the rows into arrays."
            )
        part_source = self._copy()
        part_source._blocks = np.sort(self._blocks[permutation(len(self._blocks), seed, 0)[rank::size]])
        part_source.rows = int(np.diff(self.starts)[part_source._blocks].sum())
        return part_source

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        synchronous: bool,
        batch_size: int,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Yield one rank's batches of one epoch; the arguments are those of ``ArraySource.epoch``."""
        check_batch(batch_size)
        parts = pieces(self.rows, rank=rank, size=size, batch_size=batch_size, epoch=epoch, steps=steps)
        ahead = Ahead(self, rank, size)
        arrays = iter(self.spill.arrays)
        x, y, weight = map_leaves(lambda _: next(arrays), self._tree)
        data = ArraySource(x, y, weight, self.floatx, block=0)

        def order(turn: int) -> BlockOrder:
            return BlockOrder(self.starts, seed, turn, bool(shuffle), self._blocks, ahead.enter)

        try:
            for batch in data.ordered(parts, order):
                if self.class_weight is None or not batch.rows:
                    yield batch
                else:
                    weight = self._weighted(batch.y, batch.sample_weight)
                    yield Batch(batch.x, batch.y, weight, batch.rows, batch.total)
        finally:
            if sys is not None and not sys.is_finalizing():  # else the interpreter has ended the threads
                ahead.close()

    def _weighted(self, y: ArrayTree, weight: ArrayTree) -> Any:
        return weight if self.class_weight is None else with_class_weight(y, weight, self.class_weight, self.floatx)

    def fill(self, block: int) -> None:
        """Decode a block into the spill.

        Raises:
            InvalidDataError: the rows differ in shape or dtype from the first ones, or their number has changed.
        """
        at, end = int(self.starts[block]), int(self.starts[block + 1])
        for columns in readable(self.table.read(block, self._wanted(*self.choice)), self.table.where(block)):
            decoded = self._decoded(columns)
            rows = _count(columns)
            if at + rows > end:
                raise InvalidDataError(f"{self.table.where(block)} has more rows than when it was opened.")
            for number, (leaf, array) in enumerate(zip(self._leaves, self.spill.arrays, strict=True)):
                try:
                    self.spill.put(number, at, leaf.fitting(decoded, rows, array))
                except InvalidDataError as error:
                    raise InvalidDataError(f"{self.table.where(block)}: {error}") from None
            at += rows
        if at != end:
            raise InvalidDataError(
                f"{self.table.where(block)} has {counted(end - at, 'row')} fewer than when it was opened."
            )


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


class Ahead:
    """A decoder of the current pool of blocks, and of the next pool in a thread.

    Args:
        source: FileSource.
        rank, size: each rank starts at another block of a pool, so that the ranks divide the decoding.
    """

    def __init__(self, source: FileSource, rank: int, size: int) -> None:
        self._source, self._turn = source, (rank, size)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="choros-data")
        self._next: Future[None] | None = None

    def enter(self, blocks: Rows, next_blocks: Rows) -> None:
        """Decode ``blocks``, then start to decode ``next_blocks`` in the thread."""
        if self._next is not None:
            # An error of the thread must be raised in the thread that trains.
            self._next.result()
        self._fill(blocks)
        self._next = self._pool.submit(self._fill, next_blocks) if len(next_blocks) else None

    def _fill(self, blocks: Rows) -> None:
        rank, size = self._turn
        rotated = np.roll(blocks, -(rank * len(blocks) // size))
        self._source.spill.fill(map(int, rotated), self._source.fill)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
