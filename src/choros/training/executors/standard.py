"""The executors for local workers, for ranks that a launcher starts, and for a running job."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import dataclass

from choros.launch.specs import Launcher, LaunchPreferences
from choros.training.executors import idle_workers, in_job
from choros.training.executors.executor import Executor, ExecutorLauncher, FitResult
from choros.training.executors.local import LocalRun
from choros.training.executors.remote import RemoteRun
from choros.training.executors.worker_pool import WorkerPool
from choros.training.payload import load_payload
from choros.training.spec import FitRequest


def make_executor(launcher: Launcher | ExecutorLauncher, preferences: LaunchPreferences, restarts: int) -> Executor:
    """Return the executor for a launcher."""
    if isinstance(launcher, ExecutorLauncher):
        return launcher.executor(preferences)
    return RemoteExecutor(launcher, preferences, restarts)


@dataclass
class LocalExecutor:
    """Executor on worker processes of this machine.

    Attributes:
        pool: WorkerPool.
        restarts: int. Total number of restarts after failures. Defaults to 0.
        owned: bool. Whether this executor starts and ends the workers. Unless ``kept``, they stay idle after a fit,
            for the next fit of any executor. Defaults to False.
        kept: bool. Whether the workers stay until ``close``. Defaults to False.
    """

    pool: WorkerPool
    restarts: int = 0
    owned: bool = False
    kept: bool = False
    packs_model, remote_members = True, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``."""
        request, payload = load_payload(request, on_this_host=True)
        ends = self.owned and not self.kept
        # A fit that is refused by ``lent`` leaves the other fit its workers.
        with self.pool.lent(), closing(self.pool) if ends else nullcontext():
            if self.owned:
                idle_workers.take(self.pool)
            run = LocalRun(request, payload, self.pool, self.restarts)
            record = run.run()
            result = FitResult(record, run.gather_members(), [lane for rank in run.ranks for lane in run.lanes[rank]])
            if ends:
                idle_workers.keep(self.pool, run.files)
        request.callbacks.end()
        return result

    @property
    def ready(self) -> bool:
        """True if the workers run already."""
        return idle_workers.ready(self.pool) if self.owned else self.pool.started

    def close(self) -> None:
        """End the workers if this executor owns them, also those that stay idle after a fit."""
        if self.owned:
            self.pool.close()
            idle_workers.close()


@dataclass(frozen=True)
class RemoteExecutor:
    """Executor on ranks that a launcher starts, on this host or on others.

    Attributes:
        launcher: Launcher.
        preferences: LaunchPreferences.
        restarts: int. Number of restarts of all ranks after failures. Defaults to 0.
    """

    launcher: Launcher
    preferences: LaunchPreferences
    restarts: int = 0
    packs_model, remote_members = True, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``."""
        request, payload = load_payload(request, on_this_host=False)
        run = RemoteRun(request, payload, self.launcher, self.preferences, self.restarts)
        record = run.run()
        request.callbacks.end()
        return FitResult(record, lanes=run.lanes)

    def close(self) -> None:
        """Do nothing: the ranks end with each fit."""


@dataclass(frozen=True)
class InJobExecutor:
    """Executor in this process, a rank of a running job.

    Attributes:
        rank: int.
    """

    rank: int
    packs_model, remote_members = False, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``. Collective: every rank must call it."""
        return in_job.fit(request, self.rank)

    def close(self) -> None:
        """Do nothing: no process was started."""
