"""Detection of hung asynchronous workers by their heartbeats.

Synchronous workers wait for each other, so a hang stops all of them. Asynchronous workers continue, so each heartbeat
is checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.comm.shm.group_header import last_at_barriers
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError
from choros.training.async_control.center_snapshots import is_slot_free
from choros.types import Array

if TYPE_CHECKING:
    from choros.training.spec import FitConfig

_POLL_SECONDS = 1.0  # between two polls of the heartbeats; callbacks may delay them


class HeartbeatMonitor:
    """The times of the workers' last steps, by the heartbeats in the control block.

    A worker before its first step is starting up, and does not count as hung. A waiting worker does not count either:
    it may wait for all workers to end an epoch (``whole_epochs``). In an Ensemble it may wait for callbacks of an
    epoch that other members have not ended.

    Args:
        control_block: ControlBlock or RemoteControlBlock.
        job: FitConfig.
    """

    def __init__(self, control_block: Any, job: FitConfig) -> None:
        self.control_block, self.job = control_block, job
        self.starting: set[int] = set()  # restarted ranks before the first step of the new process
        self.polled_at = time.monotonic()
        self.beats = control_block.step_counts()
        self.last_moved = np.full(job.workers, self.polled_at)  # by rank: time of the poll that saw its last step

    def poll(self) -> None:
        """Poll the heartbeats.

        If the last poll was long ago, for example because of a long callback, the time between does not count: messages
        of ranks that ended in that time are not read yet.
        """
        now, beats = time.monotonic(), self.control_block.step_counts()
        self.last_moved += max(now - self.polled_at - _POLL_SECONDS, 0.0)
        self.polled_at = now
        changed = beats != self.beats
        self.beats = beats
        self.last_moved[[*np.flatnonzero(changed), *self._waiting()]] = now
        self.starting -= set(np.flatnonzero(changed).tolist())

    def overdue(
        self, seconds: float, done: Collection[int], stopped: Callable[[int], bool] = lambda rank: False
    ) -> list[int]:
        """Return the ranks that have done no step for ``seconds``, without those that are ``done`` or starting.

        Args:
            seconds: the limit.
            done: ranks that have finished.
            stopped: returns whether a signal has stopped the process of a rank. Such a rank is not starting.
        """
        # A rank without a step is still starting up, which ``first_timeout`` limits and not ``timeout``.
        stepping = set(np.flatnonzero(self.beats).tolist()) - self.starting
        late = [rank for rank in range(self.job.workers) if time.monotonic() - self.last_moved[rank] > seconds]
        return [rank for rank in late if rank not in done and (rank in stepping or stopped(rank))]

    def restart_clock(self, rank: int | None = None) -> None:
        """Restart the clock of one rank, or of all ranks (None): they may have waited for callbacks."""
        self.last_moved[slice(None) if rank is None else rank] = time.monotonic()

    def process_restarted(self, rank: int) -> None:
        """Record that a rank has a new process, which is starting up."""
        # Steps of the old process that were not polled yet must not count as the first step of the new one.
        self.beats[rank] = self.control_block.step_counts()[rank]
        self.starting.add(rank)
        self.restart_clock(rank)

    def finished(self) -> list[int]:
        """Return the ranks that have ended the last epoch."""
        last = self.job.epochs - self.job.initial_epoch - 1
        return [rank for rank in range(self.job.workers) if self.control_block.ended(last, rank)]

    def _waiting(self) -> list[int]:
        control_block, job = self.control_block, self.job
        if job.whole_epochs:
            index = max(control_block.allowed_epoch - job.initial_epoch, 0)
            all_ended = index >= job.epochs - job.initial_epoch
            return [] if all_ended else [rank for rank in range(job.workers) if control_block.ended(index, rank)]
        if not job.ensemble:  # else only the rank that ends an epoch last waits, for callbacks that run next
            return []
        ending = (job.initial_epoch + control_block.epochs_ended(rank) for rank in range(job.workers))
        return [rank for rank, epoch in enumerate(ending) if not is_slot_free(control_block, job.initial_epoch, epoch)]


def hung_rank(beats: Array, group: Segment | None) -> int:
    """Return the rank that most likely hangs, if no rank makes progress.

    Args:
        beats: number of steps of each rank.
        group: the segment of the ranks' group, whose barriers show the missing rank. If it is None, or its barriers
            show nothing, the result is the rank with the fewest steps.
    """
    missing = None if group is None else last_at_barriers(group, len(beats))
    # Without barriers to compare, the slowest rank is the best guess.
    return int(np.argmin(beats)) if missing is None else missing


def without_progress(
    job: FitConfig, starting: bool, waited: float, stopped: Callable[[int], bool]
) -> tuple[float, int | None] | None:
    """Return the limit that was exceeded, and the rank that hangs if it is known; None if no limit was exceeded.

    Args:
        job: FitConfig.
        starting: whether some rank has made no step yet.
        waited: seconds in which no rank made a step.
        stopped: returns whether a signal has stopped the process of a rank.
    """

    def exceeded(limit: float) -> bool:
        # A tenth and 2 s later than the ranks' own limit, because their error names the rank that hangs.
        return waited > 1.1 * limit + 2.0

    # A rank may compile for ``first_timeout`` seconds. A process that a signal has stopped compiles nothing.
    rank = next(filter(stopped, range(job.workers)), None) if starting and exceeded(job.timeout) else None
    limit = job.first_timeout if starting and rank is None else job.timeout
    return (limit, rank) if exceeded(limit) else None


class JobHangs:
    """Detection of hung asynchronous ranks by another rank of their job.

    Args:
        control_block: ControlBlock or RemoteControlBlock.
        job: FitConfig.
        rank: int. This rank.
        hosts: names of the ranks' hosts.
    """

    def __init__(self, control_block: Any, job: FitConfig, rank: int, hosts: Sequence[str]) -> None:
        self.hangs = HeartbeatMonitor(control_block, job)
        self.control_block = control_block
        self.job = job
        self.rank = rank
        self.hosts = hosts
        self._begun_at = self._polled_at = time.monotonic()
        self._stopped_at: float | None = None  # when this rank first saw the request to stop

    def check(self) -> None:
        """Poll the heartbeats, at most once per second.

        Raises:
            CommTimeoutError: a rank hangs; ``missing`` holds its number.
        """
        if time.monotonic() - self._polled_at >= _POLL_SECONDS and (hung := self._hung_ranks()):
            raise CommTimeoutError(self._error_text(hung), tuple(hung))

    @contextmanager
    def watching(self, give_up: Callable[[str], None]) -> Iterator[None]:
        """Poll the heartbeats in a thread, while this rank waits for the others to end.

        Args:
            give_up: makes the wait of this rank raise an error with the given text.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_POLL_SECONDS):
                if hung := self._hung_ranks():
                    give_up(self._error_text(hung))
                    return

        thread = threading.Thread(target=watch, name="choros-hangs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self.job.timeout)  # it may use the control block's connection, which is not thread-safe

    def _hung_ranks(self) -> list[int]:
        """Return the ranks that hang. After a request to stop, ranks have ``first_timeout`` seconds to end."""
        self._polled_at = now = time.monotonic()
        self.hangs.poll()
        if self.control_block.in_callbacks:  # they may take as long as they need
            self.hangs.restart_clock(0)
        finished = {*self.hangs.finished(), self.rank}
        if self.control_block.stopped:
            # Counted from when this rank sees the stop, because the monotonic clocks of hosts differ.
            self._stopped_at = self._stopped_at or now
            expired = now - self._stopped_at > self.job.first_timeout
            return [rank for rank in range(self.job.workers) if expired and rank not in finished]
        hung = self.hangs.overdue(self.job.timeout, finished)
        if now - self._begun_at > self.job.first_timeout:
            hung += [rank for rank in np.flatnonzero(self.hangs.beats == 0).tolist() if rank not in finished]
        return hung

    def _error_text(self, hung: Sequence[int]) -> str:
        ranks, job = " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in hung), self.job
        if self._stopped_at is not None:  # ranks that have ended do not report it, so this list may include them
            return (
                f"Not all ranks have ended within {job.first_timeout:g} s of the stop; one of these hangs: {ranks}. "
                "Look at the output of these processes. The limit is the Trainer's first_timeout=."
            )
        return (
            f"{ranks} ({job.workers} ranks in all) made no step within {job.timeout:g} s, or within "
            f"{job.first_timeout:g} s before the first step. Look at the output of these processes: they are stopped, "
            "or wait for a disk or a lock. The limits are the Trainer's timeout= and first_timeout=."
        )
