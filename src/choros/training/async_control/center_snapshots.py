"""The center at an epoch's end, saved for callbacks while asynchronous workers continue.

There are two slots, for an epoch and the next one. The worker that ends an epoch last writes the epoch's slot,
validates its content and reports. Before it writes, it waits until the callbacks of the epoch two before have run,
because that epoch used the same slot. So callbacks read the center that was validated, and slow callbacks never need
more memory than two copies of the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from choros.comm.messages import Client, Done, Messages, ask
from choros.comm.shm.futex import fence
from choros.comm.shm.segment import Segment, align
from choros.types import Array

SLOTS = 2


def is_slot_free(control_block: Any, first: int, epoch: int) -> bool:
    """Return whether the slot of an epoch may be written: callbacks have read its old content, or never will.

    Args:
        control_block: ControlBlock.
        first: int. The first epoch of the run.
        epoch: int. The epoch whose center will be saved.
    """
    earlier = epoch - SLOTS  # the epoch that used the same slot
    return (
        earlier < first
        or control_block.allowed_epoch > earlier
        or (control_block.stopped and epoch >= control_block.first_unreported_epoch)
    )


# The header: lengths of the vector and of the moving statistics, bytes of a value, then for each slot its epoch + 1.
_HEADER_WORDS = 8
_FIRST_EPOCH_WORD = 3


class CenterSnapshotStore(Protocol):
    """The interface of ``CenterSnapshots`` for workers, on the same host or on another one."""

    def put(self, epoch: int, vector: Array, statistics: Array) -> None:
        """Save the center of an epoch's end."""
        ...

    def read(self, epoch: int, vector: Array, statistics: Array) -> bool:
        """Copy the center of an epoch's end into ``vector`` and ``statistics``; return False if it is not saved."""
        ...


class CenterSnapshots:
    """The two slots of the center, in one segment.

    Args:
        segment: Segment. Created by ``create``, or attached.

    Example:
        >>> snapshots = CenterSnapshots.create(np.zeros(2), np.zeros(0))
        >>> snapshots.put(3, np.ones(2), np.zeros(0))
        >>> out = np.zeros(2)
        >>> snapshots.read(3, out, np.zeros(0)), snapshots.read(2, out, np.zeros(0)), out.tolist()
        (True, False, [1.0, 1.0])
        >>> snapshots.close()
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._header = segment.array(np.int64, _HEADER_WORDS, 0)
        size, statistics_size, itemsize = (int(value) for value in self._header[:3])
        dtype = np.dtype(f"f{itemsize}")
        slot_bytes = align((size + statistics_size) * itemsize)
        flat = [segment.array(dtype, size + statistics_size, 8 * _HEADER_WORDS + i * slot_bytes) for i in range(SLOTS)]
        self._slots = [(values[:size], values[size:]) for values in flat]

    @classmethod
    def create(cls, vector: Array, statistics: Array) -> CenterSnapshots:
        """Create both slots, empty, for vectors of these sizes and this dtype (float32 or float64)."""
        nbytes = 8 * _HEADER_WORDS + SLOTS * align((vector.size + statistics.size) * vector.itemsize)
        segment = Segment.create(nbytes, "choros-snapshots")
        segment.array(np.int64, _HEADER_WORDS, 0)[:3] = vector.size, statistics.size, vector.itemsize
        return cls(segment)

    def put(self, epoch: int, vector: Array, statistics: Array) -> None:
        """Save the center of an epoch's end in place of the one two epochs before. Ignore it if the slot is newer."""
        # No lock: an epoch has one reporter.
        epoch_mark = self._header[_FIRST_EPOCH_WORD + epoch % SLOTS :][:1]
        if int(epoch_mark[0]) > epoch + 1:
            return
        epoch_mark[0] = 0  # marks the slot as invalid while it is written; ``read`` checks the mark
        fence()
        for target, source in zip(self._slots[epoch % SLOTS], (vector, statistics), strict=True):
            target[:] = source
        fence()  # the content must be complete before the mark
        epoch_mark[0] = epoch + 1

    def read(self, epoch: int, vector: Array, statistics: Array) -> bool:
        """Copy the center of an epoch's end into ``vector`` and ``statistics``; return False if it is not saved."""
        if int(self._header[_FIRST_EPOCH_WORD + epoch % SLOTS]) != epoch + 1:
            return False
        fence()  # the content must be read after the mark
        # No second check of the mark: by ``is_slot_free`` the slot is written again only after callbacks have read it.
        vector[:], statistics[:] = self._slots[epoch % SLOTS]
        return True

    def blank(self) -> tuple[Array, Array]:
        """Return empty arrays of the vectors' sizes, for ``read``."""
        vector, statistics = self._slots[0]
        return np.empty_like(vector), np.empty_like(statistics)

    def close(self) -> None:
        """Free the segment."""
        self._slots, self._header = [], np.empty(0, np.int64)
        self.segment.close()


@dataclass(frozen=True)
class PutSnapshot:
    """Save the center of an epoch's end."""

    epoch: int
    vector: Array
    statistics: Array


@dataclass(frozen=True)
class ReadSnapshot:
    """Request the center of an epoch's end."""

    epoch: int


@dataclass(frozen=True)
class SnapshotReply:
    """A saved center; the arrays are empty if it is not saved."""

    saved: bool
    vector: Array
    statistics: Array


REQUESTS = Messages(PutSnapshot, ReadSnapshot)


class RemoteCenterSnapshots:
    """The slots in the memory of another host.

    Args:
        client: connection with the host that has the slots.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, epoch: int, vector: Array, statistics: Array) -> None:
        """Save the center of an epoch's end on the other host."""
        ask(self._client, PutSnapshot(epoch, vector, statistics), Done)

    def read(self, epoch: int, vector: Array, statistics: Array) -> bool:
        """Copy the center of an epoch's end into ``vector`` and ``statistics``; return False if it is not saved."""
        reply = ask(self._client, ReadSnapshot(epoch), SnapshotReply)
        if reply.saved:
            vector[:], statistics[:] = reply.vector, reply.statistics
        return reply.saved

    def close(self) -> None:
        """Do nothing: the connection belongs to the center."""


def reply(snapshots: CenterSnapshots, request: PutSnapshot | ReadSnapshot) -> Done | SnapshotReply:
    """Serve a request of ``RemoteCenterSnapshots``; return the reply."""
    if isinstance(request, PutSnapshot):
        snapshots.put(request.epoch, request.vector, request.statistics)
        return Done()
    vector, statistics = snapshots.blank()
    saved = snapshots.read(request.epoch, vector, statistics)
    return SnapshotReply(saved, vector if saved else vector[:0], statistics if saved else statistics[:0])
