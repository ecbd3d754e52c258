"""The control block: a small shared segment through which ranks and the caller communicate.

It holds each rank's heartbeat (a count of steps), the caller's latest control message for asynchronous workers, and the
metric states of each rank and epoch. Asynchronous workers may be in different epochs. The worker whose metrics complete
an epoch is the last one of that epoch, and reports it.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import numpy as np

from choros.comm.shm.futex import fence
from choros.comm.shm.group_header import holder
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError
from choros.training.spec import TrainerControl, WorkerStats
from choros.types import Array


class Header:
    """Indices of the words in the header of a control block. The header comes before the heartbeats."""

    VERSION = 0  # number of control messages
    STOP = 1
    RATE = 2  # learning rate; valid if HAS_RATE is set
    LOG_BYTES = 3  # bytes of the epoch log
    FIRST_UNREPORTED_EPOCH = 4
    END_REQUESTED = 5
    EXIT_CODE = 6  # plus 1; 0: none
    ALLOWED_EPOCH = 7
    PAUSE = 8
    HAS_RATE = 9
    IN_CALLBACKS = 10  # 1 while rank 0 of a job runs callbacks
    SIZE = 16


_ENDED_LAST = 2  # mark of the rank that ended an epoch last; the others have 1
# A saved state begins with epoch, batch and iterations, then all numbers of ``WorkerStats`` but the first and the last.
_RECORD_HEADER_WORDS = 3 + len(fields(WorkerStats)) - 2
_RECORDS = 3  # saved states of a rank: the newest, the one before, and the one that is written next
DONE = float(1 << 52)  # pause number of a rank that makes no more exchanges


def rate_in(header: Sequence[float] | Array) -> float | None:
    """Return the learning rate in a header of a control block; None if none was set, or if it is not finite."""
    return float(header[Header.RATE]) if header[Header.HAS_RATE] and math.isfinite(header[Header.RATE]) else None


class ControlBlock:
    """A view of the control block's segment.

    Args:
        segment: Segment. Created by ``ControlBlock.create``.
        workers: int. Number of ranks.
        epochs: int. Number of epochs of the run.
        values: int. Most metric values of one rank. It may be more than a worker has: the caller's model may keep
            metrics of an earlier compile, which the workers' models do not have.

    Attributes:
        timeout: float. Seconds to wait for the lock, which is held for microseconds. Defaults to 60.
    """

    def __init__(self, segment: Segment, workers: int, epochs: int, values: int) -> None:
        self.segment, self.workers, self.timeout = segment, workers, 60.0
        self._version = 0.0
        flat = segment.array(np.float64, self._count(workers, epochs, values), 0)
        self._header, flat = flat[: Header.SIZE], flat[Header.SIZE :]
        # One cache line for each rank's counters, so that ranks do not slow each other.
        self._steps, self._pauses, flat = flat[: 8 * workers : 8], flat[1 : 8 * workers : 8], flat[8 * workers :]
        self._save_counts, flat = flat[:workers], flat[workers:]
        self._saved_records, flat = (
            flat[: workers * _RECORDS * (_RECORD_HEADER_WORDS + values)].reshape(workers, _RECORDS, -1),
            flat[workers * _RECORDS * (_RECORD_HEADER_WORDS + values) :],
        )
        self._ended, flat = flat[: epochs * workers].reshape(epochs, workers), flat[epochs * workers :]
        self._parts = flat.reshape(epochs, workers, 2, values)

    @staticmethod
    def _count(workers: int, epochs: int, values: int) -> int:
        return (
            Header.SIZE
            + 9 * workers
            + workers * _RECORDS * (_RECORD_HEADER_WORDS + values)
            + epochs * workers * (1 + 2 * values)
        )

    @classmethod
    def create(cls, workers: int, epochs: int, values: int) -> ControlBlock:
        """Create a control block, all zeros."""
        return cls(Segment.create(8 * cls._count(workers, epochs, values), "choros-control"), workers, epochs, values)

    # -- heartbeats
    def count_step(self, rank: int) -> None:
        """Count a step of ``rank``, of training or validation."""
        # No lock: only this rank writes the word, and a store of 8 aligned bytes is atomic.
        self._steps[rank] += 1

    def set_steps(self, rank: int, count: int) -> None:
        """Set the number of steps of a rank on another host."""
        self._steps[rank] = count

    def step_counts(self) -> Array:
        """Return the number of steps of each rank."""
        return self._steps.copy()

    # -- control messages
    def publish(self, control: TrainerControl, epoch: int | None = None) -> None:
        """Publish a control message for asynchronous workers, which poll the control block.

        Args:
            control: TrainerControl.
            epoch: int. If training stops in the middle of an epoch, that epoch: its end is still reported.
        """
        if control.stop:
            self._header[Header.FIRST_UNREPORTED_EPOCH] = 0 if epoch is None else epoch + 1
            fence()  # workers read the epoch once they see the stop
            self._header[Header.STOP] = 1.0
        if control.learning_rate is not None:
            self._header[Header.RATE] = control.learning_rate
            self._header[Header.HAS_RATE] = 1.0  # 0 is a valid rate, so a flag shows that there is one
        if control != TrainerControl():
            fence()  # ``rate`` reads the version before the values
            self._header[Header.VERSION] += 1

    @property
    def log_bytes(self) -> Array:
        """Number of bytes in the epoch log: a view of one value. Change it only under the lock."""
        return self._header[Header.LOG_BYTES : Header.LOG_BYTES + 1].reshape(())

    @property
    def stopped(self) -> bool:
        """True if the caller has requested to stop."""
        return bool(self._header[Header.STOP])

    @property
    def end_requested(self) -> bool:
        """True if a checkpoint and the end of this process are requested."""
        return bool(self._header[Header.END_REQUESTED])

    def request_end(self) -> None:
        """Request a checkpoint and the end of training."""
        # One store without a lock, because signal handlers call this.
        self._header[Header.END_REQUESTED] = 1.0

    @property
    def exit_code(self) -> int | None:
        """Exit code with which asynchronous ranks must end their process; None if they continue."""
        return int(self._header[Header.EXIT_CODE]) - 1 if self._header[Header.EXIT_CODE] else None

    def set_exit_code(self, code: int) -> None:
        """Make all asynchronous ranks end their process with this exit code."""
        # Plus 1, because memory begins as zeros and 0 is a valid exit code.
        self._header[Header.EXIT_CODE] = code + 1

    @property
    def first_unreported_epoch(self) -> int:
        """First epoch whose end is not reported after a stop."""
        return int(self._header[Header.FIRST_UNREPORTED_EPOCH])

    def allow_epoch(self, epoch: int) -> None:
        """Record that the callbacks of all epochs before this one have run, so waiting workers may begin it."""
        # Never lower: workers may have begun the allowed epoch already.
        self._header[Header.ALLOWED_EPOCH] = max(epoch, self._header[Header.ALLOWED_EPOCH])

    @property
    def allowed_epoch(self) -> int:
        """Latest epoch that may begin, if workers wait for each other at an epoch's end."""
        return int(self._header[Header.ALLOWED_EPOCH])

    # -- pauses without exchanges, in which a center on several hosts is saved
    @property
    def in_callbacks(self) -> bool:
        """True while rank 0 of a job runs callbacks, and so makes no step."""
        return bool(self._header[Header.IN_CALLBACKS])

    @in_callbacks.setter
    def in_callbacks(self, value: bool) -> None:
        self._header[Header.IN_CALLBACKS] = value

    def request_pause(self, number: int) -> None:
        """Request a pause: all ranks stop between two steps until the number changes. 0 ends the pause."""
        # A number and not a flag: a rank that joins late must not be counted for the next pause.
        self._header[Header.PAUSE] = number

    @property
    def requested_pause(self) -> int:
        """Number of the requested pause, or 0."""
        return int(self._header[Header.PAUSE])

    def join_pause(self, rank: int, number: float) -> None:
        """Record that a rank makes no exchange before the pause of this number is over."""
        self._pauses[rank] = number

    def joined_pause(self, rank: int) -> float:
        """Return the number of the last pause that a rank has joined."""
        return float(self._pauses[rank])

    def rate(self) -> float | None:
        """Return the latest learning rate if there was a control message since the last call, else None."""
        version = float(self._header[Header.VERSION])
        if version == self._version:
            return None
        self._version = version
        fence()  # the rate must be read after the version with which it was written
        return self.published_rate

    @property
    def published_rate(self) -> float | None:
        """Learning rate of the latest control message that has one, or None."""
        return rate_in(self._header)

    def header(self) -> list[float]:
        """Return a copy of the header, for ranks on other hosts."""
        # In the order of the words: version and stop are read before the values that they publish (see ``publish``).
        return [float(value) for value in self._header]

    # -- sums of metrics
    def add(self, epoch: int, rank: int, train: Array, validation: Array) -> bool:
        """Add a rank's metric state to an epoch.

        A second call for the same rank and epoch changes nothing, and returns the same result as the first one.

        Args:
            epoch: int. Counted from the first epoch of the run.
            rank: int.
            train: metric state of training, at most ``values`` values.
            validation: figures of validation, at most ``values`` values.

        Returns:
            Whether this rank was the last one to end the epoch.
        """
        with self.locked():
            if not self._ended[epoch, rank]:
                self._parts[epoch, rank, 0, : len(train)] = train
                self._parts[epoch, rank, 1, : len(validation)] = validation
                others = np.delete(self._ended[epoch], rank)
                fence()  # ``complete``, ``sums``, ``rank_metrics`` and ``export_metrics`` read without the lock
                # Written last: a rank that is killed before this line has added nothing.
                self._ended[epoch, rank] = _ENDED_LAST if others.all() else 1
            return bool(self._ended[epoch, rank] == _ENDED_LAST)

    def ended(self, epoch: int, rank: int) -> bool:
        """Return whether a rank has ended an epoch, by ``add``."""
        return bool(self._ended[epoch, rank])

    def epochs_ended(self, rank: int) -> int:
        """Return the number of epochs that a rank has ended."""
        return int(np.count_nonzero(self._ended[:, rank]))

    def complete(self, epoch: int) -> bool:
        """Return whether all ranks have ended an epoch."""
        complete = bool(self._ended[epoch].all())
        fence()  # ``sums`` and ``rank_metrics`` must be read after these marks
        return complete

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums over ranks: metric states of training, and figures of validation."""
        train, validation = self._parts[epoch].sum(axis=0)
        return train, validation

    def rank_metrics(self, epoch: int, rank: int) -> tuple[Array, Array]:
        """Return a rank's metric state and its figures of validation for an epoch."""
        train, validation = self._parts[epoch, rank].copy()
        return train, validation

    # -- the state from which a restarted rank resumes
    def save_position(
        self, rank: int, position: tuple[int, int], iterations: int, stats: list[float], state: Array
    ) -> None:
        """Save a rank's counts and its metric state of the current epoch.

        The new state becomes valid at the end, so if the rank is killed in this call, the previous one stays the
        newest. The state before the newest is kept, for a checkpoint whose center is older than the newest state.

        Args:
            rank: int.
            position: the epoch, and the number of its batches that are done.
            iterations: the optimizer's count of steps.
            stats: numbers of the rank's ``WorkerStats``.
            state: the metric state.
        """
        saves = int(self._save_counts[rank])
        fence()  # a copy of the record that is overwritten now must find the count changed
        spare = self._saved_records[rank, (saves + 1) % _RECORDS]
        spare[:3], spare[3 : 3 + len(stats)] = (*position, iterations), stats
        spare[_RECORD_HEADER_WORDS : _RECORD_HEADER_WORDS + len(state)] = state
        fence()  # the copy must be complete before the count that makes it valid
        self._save_counts[rank] = saves + 1

    def saved_position(
        self, rank: int, position: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], int, Array, Array] | None:
        """Return a saved position of a rank, its iterations, counts and metric state; None if the rank has saved none.

        Args:
            rank: int.
            position: the position of the state. By default, or if no state of it is kept, the newest state is returned.
        """
        saves, newest, earlier = self._saved(rank)
        if not saves:
            return None
        matches = saves > 1 and position is not None and tuple(newest[:2]) != position == tuple(earlier[:2])
        record = earlier if matches else newest
        return (
            (int(record[0]), int(record[1])),
            int(record[2]),
            record[3:_RECORD_HEADER_WORDS],
            record[_RECORD_HEADER_WORDS:],
        )

    def _saved(self, rank: int) -> tuple[int, Array, Array]:
        """Return a rank's number of saved states, and copies of the last two; the rank may save more meanwhile."""
        while True:
            saves = int(self._save_counts[rank])
            fence()  # the copies must be read after the count that selects them
            newest, earlier = (self._saved_records[rank, (saves - age) % _RECORDS].copy() for age in (0, 1))
            fence()
            # The rank overwrites these records only after it has increased the count.
            if self._save_counts[rank] == saves:
                return saves, newest, earlier

    def export_positions(self) -> list[Array]:
        """Return copies of the ranks' saved states, for a checkpoint."""
        save_counts, left = np.zeros_like(self._save_counts), np.zeros_like(self._saved_records)
        for rank in range(self.workers):
            saves, newest, earlier = self._saved(rank)
            save_counts[rank], left[rank, saves % _RECORDS], left[rank, (saves - 1) % _RECORDS] = saves, newest, earlier
        return [save_counts, left]

    def export_metrics(self, epoch: int) -> list[Array]:
        """Return copies of the metrics that ranks have added from this epoch on, for a checkpoint."""
        ended = self._ended[epoch:].copy()
        fence()  # the metric states must be read after the marks that publish them
        return [ended, self._parts[epoch:].copy()]

    def import_state(self, state: list[Array]) -> None:
        """Restore the results of ``export_positions`` and ``export_metrics``, from the epoch passed there on."""
        save_counts, saved, ended, parts = state
        self._save_counts[:], self._saved_records[:] = save_counts, saved
        # A resumed run may have another number of epochs than the saved one.
        count = min(len(ended), len(self._ended))
        self._ended[:count], self._parts[:count] = ended[:count], parts[:count]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock within this context. The kernel releases it when its holder dies.

        Raises:
            CommTimeoutError: another process has held it for ``timeout`` seconds: it is alive, but stopped.
        """
        deadline = time.monotonic() + self.timeout
        try:
            while True:
                try:
                    # Polled, because a blocking call of the kernel has no time limit: a stopped holder would stop all
                    # other ranks.
                    fcntl.lockf(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                    break
                # POSIX allows both errors, EAGAIN and EACCES, for a lock that another process holds.
                except (BlockingIOError, PermissionError):
                    if time.monotonic() > deadline:
                        raise CommTimeoutError(
                            f"the control block of this run has been locked for {self.timeout:g} s by process "
                            f"{holder(self.segment.fd, 0)}, which is alive, but stopped: see what it is doing."
                        ) from None
                    time.sleep(0.0005)
            yield
        finally:
            # An interrupt may arrive right after the lock was taken. LOCK_UN has no effect on another process's lock.
            fcntl.lockf(self.segment.fd, fcntl.LOCK_UN, 1)

    def close(self) -> None:
        """Release the segment."""
        del self._header, self._steps, self._pauses, self._save_counts, self._saved_records, self._ended, self._parts
        self.segment.close()
