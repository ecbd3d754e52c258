"""The noticeboard: one small shared segment through which a run's ranks and its caller keep in touch.

It holds each rank's heartbeat (steps done), the caller's latest orders for workers that never wait, and the sums of
metrics that workers in different epochs leave behind: the worker that completes an epoch's sum knows it is the last.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from choros.comm.shm.futex import fence
from choros.comm.shm.group_header import holder
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError
from choros.training.spec import TrainerControl
from choros.types import Array

# Before the heartbeats: version, stop, learning rate, mail, last epoch, asked, left, opened epoch, halt, has a rate
_HEAD = 16
_LAST = 2  # of the rank that ended an epoch last; the others have a 1
_NOW = 16  # values before a rank's metric state: epoch, batch, iterations of the optimizer, tally
DONE = float(1 << 52)  # at rest for good


class ControlBlock:
    """A view of the board's segment.

    Args:
        segment: Segment. Made by ``ControlBlock.create``.
        workers: int. Ranks.
        epochs: int. Rows of the tables.
        values: int. Metric values of one rank, or more: a model that was compiled again may keep metrics that the
            workers' do not have.

    Attributes:
        timeout: float. Seconds to wait for the lock, which is held for microseconds.
    """

    def __init__(self, segment: Segment, workers: int, epochs: int, values: int) -> None:
        self.segment, self.workers, self.timeout = segment, workers, 60.0
        self._version = 0.0
        flat = segment.array(np.float64, self._count(workers, epochs, values), 0)
        self._head, flat = flat[:_HEAD], flat[_HEAD:]
        self._beats, self._rests, flat = flat[: 8 * workers : 8], flat[1 : 8 * workers : 8], flat[8 * workers :]
        self._turns, flat = flat[:workers], flat[workers:]
        self._left, flat = (
            flat[: workers * 2 * (_NOW + values)].reshape(workers, 2, -1),
            flat[workers * 2 * (_NOW + values) :],
        )
        self._ended, flat = flat[: epochs * workers].reshape(epochs, workers), flat[epochs * workers :]
        self._parts = flat.reshape(epochs, workers, 2, values)

    @staticmethod
    def _count(workers: int, epochs: int, values: int) -> int:
        return _HEAD + 9 * workers + workers * 2 * (_NOW + values) + epochs * workers * (1 + 2 * values)

    @classmethod
    def create(cls, workers: int, epochs: int, values: int) -> ControlBlock:
        """Make a board, all zeros."""
        return cls(Segment.create(8 * cls._count(workers, epochs, values), "choros-notices"), workers, epochs, values)

    # -- heartbeats
    def beat(self, rank: int) -> None:
        """Say that ``rank`` has done a step, of training or validation."""
        self._beats[rank] += 1

    def beaten(self, rank: int, count: int) -> None:
        """Say how many steps a rank of another host has done."""
        self._beats[rank] = count

    def beats(self) -> Array:
        """Steps done by each rank."""
        return self._beats.copy()

    # -- orders
    def order(self, orders: TrainerControl, epoch: int | None = None) -> None:
        """Give orders to workers that look when they meet the centre.

        Args:
            orders: TrainerControl.
            epoch: int. Where they stop in the middle of an epoch, which: its end is still reported.
        """
        if orders.stop:
            self._head[4] = 0 if epoch is None else epoch + 1
            self._head[1] = 1.0
        if orders.learning_rate is not None:
            self._head[2] = orders.learning_rate
            self._head[9] = 1.0  # zero is a rate too
        if orders != TrainerControl():
            self._head[0] += 1

    @property
    def post(self) -> Array:
        """The fill level of the mail of epochs' logs (a view of one value, to be changed under the lock)."""
        return self._head[3:4].reshape(())

    @property
    def stopped(self) -> bool:
        """True if the caller asked to stop."""
        return bool(self._head[1])

    @property
    def asked(self) -> bool:
        """True if somebody asks for a checkpoint and the end of this process."""
        return bool(self._head[5])

    def ask(self) -> None:
        """Ask for a checkpoint and the end."""
        self._head[5] = 1.0

    @property
    def code(self) -> int | None:
        """With which code ranks that wait for nobody are to end their process; None: they are not."""
        return int(self._head[6]) - 1 if self._head[6] else None

    def leave_with(self, code: int) -> None:
        """Have all ranks end their process with this code."""
        self._head[6] = code + 1

    @property
    def last(self) -> int:
        """After a stop, the first epoch whose end is not reported."""
        return int(self._head[4])

    def open(self, epoch: int) -> None:
        """Say that the callbacks of all epochs before this one have run; who waits for all may begin it."""
        self._head[7] = max(epoch, self._head[7])

    @property
    def opened(self) -> int:
        """The latest epoch that may begin, of workers that wait for all at an epoch's end."""
        return int(self._head[7])

    # -- a moment in which nobody is at the centre
    def halt(self, number: int) -> None:
        """Have all ranks rest until ``number`` is another one; 0: go on."""
        self._head[8] = number

    @property
    def halted(self) -> int:
        """The number of the rest that is asked for, or 0."""
        return int(self._head[8])

    def rest(self, rank: int, number: float) -> None:
        """Say that a rank does not go to the centre before the halt of this number is over."""
        self._rests[rank] = number

    def rests(self, rank: int) -> float:
        """Return of which halt a rank said so last."""
        return float(self._rests[rank])

    def rate(self) -> float | None:
        """Return the learning rate of orders given since this process last looked, or None."""
        version = float(self._head[0])
        if version == self._version:
            return None
        self._version = version
        fence()  # the rate is read after the version that it came with
        return self.ordered_rate

    @property
    def ordered_rate(self) -> float | None:
        """The learning rate of the latest orders that have one, or None."""
        rate = float(self._head[2])
        return rate if self._head[9] and math.isfinite(rate) else None

    def head(self) -> list[float]:
        """Return the orders as they stand, for who reads them elsewhere."""
        return [float(value) for value in self._head]

    # -- sums of metrics
    def add(self, epoch: int, rank: int, train: Array, validation: Array) -> bool:
        """Add a rank's metric state to its epoch; True for the rank that completes it, also when it adds once more."""
        with self.locked():
            if not self._ended[epoch, rank]:
                self._parts[epoch, rank, 0, : len(train)] = train
                self._parts[epoch, rank, 1, : len(validation)] = validation
                others = np.delete(self._ended[epoch], rank)
                self._ended[epoch, rank] = _LAST if others.all() else 1  # now: one killed before it has added nothing
            return bool(self._ended[epoch, rank] == _LAST)

    def ended(self, epoch: int, rank: int) -> bool:
        """Tell whether a rank has added to an epoch."""
        return bool(self._ended[epoch, rank])

    def epochs_ended(self, rank: int) -> int:
        """Return how many epochs a rank has added to."""
        return int(np.count_nonzero(self._ended[:, rank]))

    def complete(self, epoch: int) -> bool:
        """Tell whether all ranks have added to an epoch."""
        return bool(self._ended[epoch].all())

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums: metric states of training, and figures of validation."""
        train, validation = self._parts[epoch].sum(axis=0)
        return train, validation

    def part(self, epoch: int, rank: int) -> tuple[Array, Array]:
        """Return what a rank has added to an epoch: its metric state, and its figures of validation."""
        train, validation = self._parts[epoch, rank].copy()
        return train, validation

    # -- what a rank would need to begin anew
    def leave(self, rank: int, place: tuple[int, int], iterations: int, tally: list[float], state: Array) -> None:
        """Leave a rank's tally and metric state of the epoch in which it is; one that was killed here left the last.

        Args:
            rank: int.
            place: its epoch, and how many of the epoch's batches are done.
            iterations: its optimizer's count of steps.
            tally: figures of its ``WorkerStats``.
            state: of its metrics.
        """
        turn = int(self._turns[rank])
        spare = self._left[rank, 1 - turn % 2]
        spare[:3], spare[3 : 3 + len(tally)] = (*place, iterations), tally
        spare[_NOW : _NOW + len(state)] = state
        fence()
        self._turns[rank] = turn + 1

    def left(self, rank: int) -> tuple[tuple[int, int], int, Array, Array] | None:
        """Return what a rank left last: its place, iterations, tally and metric state; None where it left nothing."""
        turn = int(self._turns[rank])
        if not turn:
            return None
        fence()  # what was left is read after the turn that says where it is
        own = self._left[rank, turn % 2]
        return (int(own[0]), int(own[1])), int(own[2]), own[3:_NOW].copy(), own[_NOW:].copy()

    def whole(self, epoch: int) -> list[Array]:
        """Return copies of all that ranks left and added, from this epoch on."""
        return [self._turns.copy(), self._left.copy(), self._ended[epoch:].copy(), self._parts[epoch:].copy()]

    def put_back(self, whole: list[Array]) -> None:
        """Put back what ``whole`` gave; this board begins with that epoch."""
        turns, left, ended, parts = whole
        self._turns[:], self._left[:] = turns, left
        count = min(len(ended), len(self._ended))
        self._ended[:count], self._parts[:count] = ended[:count], parts[:count]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; the kernel frees it when its holder dies.

        Raises:
            CommTimeoutError: another process holds it, alive but stopped.
        """
        limit = time.monotonic() + self.timeout
        while True:
            try:
                fcntl.lockf(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > limit:
                    raise CommTimeoutError(
                        f"the noticeboard of this run has been held for {self.timeout:g} s by process "
                        f"{holder(self.segment.fd, 0)}, which is alive, but stopped: see what it is doing."
                    ) from None
                time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.lockf(self.segment.fd, fcntl.LOCK_UN, 1)

    def close(self) -> None:
        """Let the segment go."""
        del self._head, self._beats, self._rests, self._turns, self._left, self._ended, self._parts
        self.segment.close()
