"""Detection of hung workers where workers do not wait for each other, so that the others' steps do not show a hang."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import numpy as np

from choros.training.snapshots import has_room

_OFTEN = 1.0  # seconds between two looks, but for callbacks


class Hangs:
    """The times of the workers' last steps, by the heartbeats on the noticeboard.

    A worker that has yet to do its first step is starting up, and none of these. Nor is one that waits: for all to end
    an epoch, where that is asked for, or, in an Ensemble, for callbacks of an epoch that others have yet to end.

    Args:
        board: Noticeboard.
        job: Job.
    """

    def __init__(self, board: Any, job: Any) -> None:
        self.board, self.job = board, job
        self.starting: set[int] = set()  # ranks whose new processes have yet to do a step
        self.looked = time.monotonic()
        self.beats, self.moved = board.beats(), np.full(job.workers, self.looked)

    def look(self) -> None:
        """Read the heartbeats.

        What passed while nobody looked, as in a long callback, does not count: ranks that ended meanwhile have yet to
        be heard.
        """
        now, beats = time.monotonic(), self.board.beats()
        self.moved += max(now - self.looked - _OFTEN, 0.0)
        self.looked = now
        fresh = beats != self.beats
        self.beats = beats
        self.moved[[*np.flatnonzero(fresh), *self._waiting()]] = now
        self.starting -= set(np.flatnonzero(fresh).tolist())

    def late(self, seconds: float, done: Collection[int]) -> list[int]:
        """Return the ranks that have done no step for so long, but for those that are done."""
        stepping = set(np.flatnonzero(self.beats).tolist()) - self.starting - set(done)
        return [rank for rank in sorted(stepping) if time.monotonic() - self.moved[rank] > seconds]

    def forgive(self, rank: int | None = None) -> None:
        """Count from now for one rank, or for all: it may have waited for callbacks."""
        self.moved[slice(None) if rank is None else rank] = time.monotonic()

    def began_anew(self, rank: int) -> None:
        """Have a rank start up: it has a new process."""
        self.beats[rank] = self.board.beats()[rank]
        self.starting.add(rank)
        self.forgive(rank)

    def _waiting(self) -> list[int]:
        board, job = self.board, self.job
        if job.whole_epochs:
            index = max(board.opened - job.initial_epoch, 0)
            over = index >= job.epochs - job.initial_epoch
            return [] if over else [rank for rank in range(job.workers) if board.ended(index, rank)]
        if not job.ensemble:  # of others only who ends an epoch last waits for callbacks, which come next
            return []
        ending = (job.initial_epoch + board.epochs_ended(rank) for rank in range(job.workers))
        return [rank for rank, epoch in enumerate(ending) if not has_room(board, job.initial_epoch, epoch)]
