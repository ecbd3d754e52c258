"""Restarts: when a worker fails and ``restarts`` are left, a new process takes its place, and all go on."""

from __future__ import annotations

import sys
import time
from typing import Any

from choros.errors import WorkerFailed
from choros.launch.local import Pool
from choros.training.pool import WorkerPool
from choros.training.record import Restart

_OWN_FAULT = ("BadInput", "UnknownAlgorithm", "Unstable", "NotExact", "NotSerializable", "BadData", "RanksDiffer")


class Mender:
    """Counts a run's restarts, and replaces workers.

    Args:
        restarts: int. How many are left.
        workers: int. How many the run has.

    Attributes:
        done: list of Restart.
        retry: bool. Whether the run goes on after the failure that was judged last.
        missing: ranks for which the one that failed had waited.
        unfit: set of ranks whose processes have ended, or do not answer.
    """

    def __init__(self, restarts: int, workers: int) -> None:
        self.left, self.workers = restarts, workers
        self.done: list[Restart] = []
        self.unfit: set[int] = set()
        self.retry = False
        self.missing: list[int] = []
        self._begun = time.monotonic()

    def judge(self, event: dict[str, Any]) -> None:
        """Judge whether after a failure a new process may do better: not where the input was refused."""
        self.missing = list(event.get("missing", ()))
        self.retry = self.left > 0 and str(event.get("type", "")).rpartition(".")[2] not in _OWN_FAULT

    def count(self, error: WorkerFailed, place: tuple[int, int] | None, whole: bool) -> None:
        """Count a restart, and say so on stderr.

        Args:
            error: what a worker met.
            place: epoch and batch with which training goes on; None is the beginning.
            whole: whether all go back to it; else that worker alone.
        """
        self.left, self.retry = self.left - 1, False
        epoch, batch = place or (0, 0)
        rank = self.missing[0] if self.missing else error.rank  # one that waited in vain is not to blame
        made = Restart(
            rank, error.host, error.signal, str(error).partition("\n")[0], time.monotonic() - self._begun,
            epoch, batch,
        )  # fmt: skip
        self.done.append(made)
        who = "all go on" if whole else f"rank {rank} goes on in a new process"
        why = made.reason.rstrip(".")
        print(
            f"choros: {why}; {who} with epoch {epoch + 1}, batch {batch} ({self.left} restarts left)",
            file=sys.stderr,
            flush=True,
        )

    def start(self, workers: WorkerPool) -> Pool:
        """Start the workers, with new processes in the places of those that are unfit.

        Raises:
            WorkerFailed: one ended while it started; the failure is judged.
        """
        unfit, self.unfit = self.unfit, set()
        try:
            return workers.start(unfit)
        except WorkerFailed:
            self.judge({})
            raise
