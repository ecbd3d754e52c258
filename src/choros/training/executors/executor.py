"""The interface between ``Trainer`` and the processes that train: one ``Executor`` for each way to run ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from choros.launch.specs import LaunchPreferences
from choros.training.run_record import RunRecord
from choros.training.spec import FitRequest


@dataclass(frozen=True)
class FitResult:
    """The result of a fit, besides the trained model and its history.

    Attributes:
        record: RunRecord. The work of all ranks.
        models: list of keras.Model. The members of an Ensemble; empty for all other algorithms.
        lanes: list of bytes. The ranks' lanes of the timeline (``choros.comm.trace_format.lane``); empty if none is
            recorded, and on ranks of a job other than 0.
    """

    record: RunRecord
    models: list[Any] = field(default_factory=list)
    lanes: list[bytes] = field(default_factory=list)


class Executor(Protocol):
    """The interface to the processes that run the fits of one ``Trainer``.

    Attributes:
        packs_model: bool. Whether ``FitRequest.written`` must hold the model, because the ranks are other processes.
        remote_members: bool. Whether the members of an Ensemble run copies of the callbacks in processes elsewhere.
    """

    packs_model: bool
    remote_members: bool

    def run(self, request: FitRequest) -> FitResult:
        """Train. At the end the model holds the trained weights, and the callbacks have run.

        Raises:
            WorkerFailedError: a rank failed, and no restart was left.
        """
        ...

    def close(self) -> None:
        """End the processes that this executor has started and kept."""
        ...


@runtime_checkable
class ExecutorLauncher(Protocol):
    """A launcher with an executor, such as ``choros.Spark``. Other launchers start ranks for ``RemoteExecutor``."""

    def size(self) -> int | None:
        """Return the number of workers that can run now; None if it is not known."""
        ...

    def executor(self, preferences: LaunchPreferences) -> Executor:
        """Return the executor."""
        ...
