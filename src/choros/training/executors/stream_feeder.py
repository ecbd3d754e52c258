"""Batches of a stream, read by a thread of the caller and passed to the workers through shared memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from choros.comm.shm.ring_buffer import Ring
from choros.comm.shm.segment import align
from choros.data import Source, serialization
from choros.data.stream_source import NO_PARTS, StreamSource, divided
from choros.data.tree import map_leaves
from choros.errors import InvalidDataError
from choros.training.spec import FitConfig
from choros.types import Array, Batch

# A slot has at least 64 MiB and at least 16 times the first batch. Pages are allocated only when they are written.
_MIN_SLOT_BYTES, _BATCHES_PER_SLOT = 1 << 26, 16
_HEADER_OFFSET = 64  # of the JSON header in a slot; its length comes first, and the arrays after it


class StreamFeeder:
    """The caller's end of a stream. It reads the epochs, a few batches ahead of the workers.

    Args:
        source: StreamSource.
        job: FitConfig.

    Attributes:
        error: the exception that reading the stream raised, or None.
    """

    def __init__(self, source: StreamSource, job: FitConfig) -> None:
        self.error: BaseException | None = None
        self._source, self._job, self._stopped = source, job, False
        first = serialization.flat(source.sample())[1]
        nbytes = _BATCHES_PER_SLOT * sum(array.nbytes for array in first)
        self.ring = Ring.create(job.workers, source.depth, max(_MIN_SLOT_BYTES, nbytes))
        self._thread = threading.Thread(target=self._run, name="choros-feeder", daemon=True)

    def start(self) -> None:
        """Start the reading thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self._job.initial_epoch, self._job.epochs):
                for x, y, weight, rows in self._source.batches(self._job.steps):
                    self._put(Batch(x, y, weight, rows=rows, total=rows))
                # An empty message marks the end of an epoch. Only the caller knows where a stream ends.
                self.ring.put(0, lambda memory: None, self._check)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
            # The workers wait in other processes, where this exception is not seen: their waits must fail too.
            self.ring.leave()

    def _put(self, batch: Batch) -> None:
        tree, arrays = serialization.flat(batch)
        entries, nbytes = serialization.layout(arrays)
        header = json.dumps([tree, entries, batch.rows]).encode()
        data_offset = align(_HEADER_OFFSET + len(header))

        def write(memory: Array) -> None:
            memory[:8].view(np.int64)[0] = len(header)
            memory[_HEADER_OFFSET : _HEADER_OFFSET + len(header)] = np.frombuffer(header, np.uint8)
            serialization.write(entries, arrays, memory[data_offset:])

        self.ring.put(data_offset + nbytes, write, self._check)

    def _check(self, waited: float) -> None:
        if self._stopped:
            raise _Stopped

    def close(self) -> None:
        """Stop reading. If the stream blocks for 5 more seconds, leave the thread and the ring as they are."""
        self._stopped = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self.ring.close()


class _Stopped(Exception):
    """The run is over."""


class StreamReader:
    """A worker's end of a stream: a source of the batches that the caller reads.

    Args:
        sample: Batch. The first batch, to build a model.
        ring: Ring.
        rank: int. This worker.
        timeout: float. Seconds to wait for a batch.
        ahead: int. Number of batches to prepare before their steps. Defaults to 0.
    """

    rows: int | None = None
    indexed = False

    def __init__(self, sample: Batch, ring: Ring, rank: int, timeout: float, ahead: int = 0) -> None:
        self._sample, self._ring, self._rank, self._timeout, self.ahead = sample, ring, rank, timeout, ahead

    def sample(self, batch_size: int = 0) -> Batch:
        """Return the stream's first batch."""
        return self._sample

    def steps(self, batch_size: int = 0) -> None:
        """Return None: only the caller knows where the stream ends."""

    def part(self, rank: int, size: int, seed: int) -> Source:
        """Refuse to return a shard; see ``StreamSource.part``."""
        raise InvalidDataError(NO_PARTS)

    def epoch(self, *, rank: int, size: int, **_: Any) -> Iterator[Batch]:
        """Yield one rank's share of the next epoch's batches, copied. The caller decides their order and number."""
        # A slot is written again after the next batch is taken, and a batch that is prepared ahead is used later than
        # that.
        for batch in divided(self._batches(), rank, size):
            x, y, weight = (map_leaves(np.copy, part) for part in (batch.x, batch.y, batch.sample_weight))
            yield Batch(x, y, weight, batch.rows, batch.total)

    def _batches(self) -> Iterator[tuple[Any, Any, Any, int]]:
        while True:
            memory = self._ring.take(self._rank, self._timeout)
            if not len(memory):
                self._ring.release(self._rank)
                return
            length = int(memory[:8].view(np.int64)[0])
            tree, entries, rows = json.loads(memory[_HEADER_OFFSET : _HEADER_OFFSET + length].tobytes())
            data_offset = align(_HEADER_OFFSET + length)
            batch = serialization.nested(tree, serialization.views(entries, memory[data_offset:]))
            yield *batch, rows
            self._ring.release(self._rank)

    def close(self) -> None:
        """Release the ring."""
        self._ring.close()
