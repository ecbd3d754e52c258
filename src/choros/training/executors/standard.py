"""The executors of local workers, of ranks that a launcher starts, and of a job that runs already."""

from __future__ import annotations

from dataclasses import dataclass

from choros.launch.specs import Launcher, LaunchPreferences
from choros.training.executors import in_job
from choros.training.executors.executor import Executor, ExecutorLauncher, FitResult
from choros.training.executors.local import LocalRun
from choros.training.executors.remote import RemoteRun
from choros.training.executors.worker_pool import WorkerPool
from choros.training.payload import load_payload
from choros.training.spec import FitRequest


def make_executor(launcher: Launcher | ExecutorLauncher, preferences: LaunchPreferences, restarts: int) -> Executor:
    """Return the executor of a launcher."""
    if isinstance(launcher, ExecutorLauncher):
        return launcher.executor(preferences)
    return RemoteExecutor(launcher, preferences, restarts)


@dataclass
class LocalExecutor:
    """Worker processes of this machine.

    Attributes:
        pool: WorkerPool.
        restarts: int. How often failed workers are started again, in all.
        owned: bool. Whether the workers end with a fit, unless ``kept``.
        kept: bool. Whether the workers stay until ``close``.
    """

    pool: WorkerPool
    restarts: int = 0
    owned: bool = False
    kept: bool = False
    packs_model, remote_members = True, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``."""
        request, payload = load_payload(request, here=True)
        try:
            run = LocalRun(request, payload, self.pool, self.restarts)
            result = FitResult(run.run(), run.gather_members())
        finally:
            if not self.kept:
                self.close()
        request.conductor.end()
        return result

    def close(self) -> None:
        """End the workers that were started for this executor."""
        if self.owned:
            self.pool.close()


@dataclass(frozen=True)
class RemoteExecutor:
    """Ranks that a launcher starts, here or on other hosts.

    Attributes:
        launcher: Launcher.
        preferences: LaunchPreferences.
        restarts: int. How often all ranks are started again after a failure.
    """

    launcher: Launcher
    preferences: LaunchPreferences
    restarts: int = 0
    packs_model, remote_members = True, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``."""
        request, payload = load_payload(request, here=False)
        record = RemoteRun(request, payload, self.launcher, self.preferences, self.restarts).run()
        request.conductor.end()
        return FitResult(record)

    def close(self) -> None:
        """Do nothing: the ranks have ended with the fit."""


@dataclass(frozen=True)
class InJobExecutor:
    """This process, a rank of a job that runs already.

    Attributes:
        rank: int.
    """

    rank: int
    packs_model, remote_members = False, False

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``Executor``. All ranks call it."""
        return FitResult(in_job.fit(request, self.rank))

    def close(self) -> None:
        """Do nothing: no process was started."""
