"""Restarts: if a worker fails and ``restarts`` are left, a new process replaces it, and training resumes."""

from __future__ import annotations

import logging
import time

from choros.errors import WorkerFailedError, counted
from choros.launch.process.failure_report import RankFailure
from choros.launch.process.worker_pool import Pool
from choros.training.executors.worker_pool import WorkerPool
from choros.training.run_record import Restart

logger = logging.getLogger(__name__)

# Errors of the user's model, data or arguments: a restart would only repeat them.
_NOT_RETRIED = (
    "InvalidInputError",
    "UnknownAlgorithmError",
    "UnstableAlgorithmError",
    "InexactLossError",
    "NotSerializableError",
    "InvalidDataError",
    "RankMismatchError",
)


class RestartPolicy:
    """The policy of restarts: whether to restart after a failure, the restarts left, the workers to replace.

    Args:
        restarts: int. Number of restarts left.
        workers: int. Number of workers of the run.
        rereadable: bool. Whether the data can be read again, unlike a stream. Defaults to True.

    Attributes:
        done: list of Restart. The restarts so far.
        retry: bool. Whether a restart is possible after the last failure.
        missing: list of int. Ranks for which the failed rank was waiting when it timed out.
        unfit: set of int. Ranks whose process has exited or does not respond.
        idle: set of int. Until training begins: ranks whose process has served an earlier fit. None: not known yet.
    """

    def __init__(self, restarts: int, workers: int, rereadable: bool = True) -> None:
        self.left, self.workers = restarts, workers
        self.done: list[Restart] = []
        self.unfit: set[int] = set()
        self.idle: set[int] | None = None if rereadable else set()
        self.retry, self._counts = False, True
        self.missing: list[int] = []
        self._begun_at = time.monotonic()

    def was_idle(self, rank: int, report: RankFailure) -> bool:
        """Return whether a worker that was idle before this fit has ended before training began."""
        return report.died and rank in (self.idle or ())

    def judge(self, report: RankFailure | None, rank: int | None = None) -> None:
        """Set ``retry``: True if restarts are left, and the error is not one that a restart would repeat.

        It is also True if a worker that was idle before this fit has ended before training began. This happens once,
        also without restarts, and does not count as one.

        Args:
            report: the failure; None if there is no report.
            rank: the rank of the failure; None if all ranks train already, or none has started.
        """
        report = report or RankFailure()
        was_idle = rank is not None and self.was_idle(rank, report)
        self.missing, self._counts = report.missing, not was_idle
        self.retry = was_idle or (self.left > 0 and report.type.rpartition(".")[2] not in _NOT_RETRIED)

    def count(self, error: WorkerFailedError, position: tuple[int, int] | None, all_ranks: bool) -> None:
        """Count a restart, unless it replaces a worker that was idle, and report it on stderr.

        Args:
            error: the worker's failure.
            position: epoch and batch at which training resumes; None means from the start.
            all_ranks: True if all ranks go back to ``position``; False if only the failed rank does.
        """
        self.retry = False
        if not self._counts:
            self.idle = set()  # only once: the next failure may have a cause that new workers do not remove
            first_line = str(error).partition("\n")[0]
            logger.warning(f"{first_line}; it was idle before this fit, which starts a new worker")
            return
        self.left -= 1
        epoch, batch = position or (0, 0)
        rank = self.missing[0] if self.missing else error.rank  # the rank that timed out is not the cause
        restart = Restart(
            rank, error.host, error.signal, str(error).partition("\n")[0], time.monotonic() - self._begun_at,
            epoch, batch,
        )  # fmt: skip
        self.done.append(restart)
        scope = "all ranks restart" if all_ranks else f"rank {rank} restarts in a new process"
        cause = restart.reason.rstrip(".")
        position_text = f"epoch {epoch + 1}, after {batch} of its batches"
        logger.warning(f"{cause}; {scope} in {position_text} ({counted(self.left, 'restart')} left)")

    def start(self, workers: WorkerPool) -> Pool:
        """Start the workers, with new processes for ``unfit`` ranks.

        Raises:
            WorkerFailedError: a worker ended during start-up. ``retry`` is True if another attempt is possible.
        """
        try:
            pool = workers.start(self.unfit)
        except WorkerFailedError:
            self.judge(None)  # no input of the user is read during start-up, so a restart does not repeat such an error
            raise
        self.unfit = set()
        if self.idle is None:
            self.idle = set(pool.called)
        return pool
