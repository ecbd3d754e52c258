"""A rank's access to the callbacks and the checkpoint of the process that called ``fit``, over a connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from choros.comm.messages import ask, decode, header_of
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import AGAIN, ChorosError
from choros.training.checkpoint import Checkpoint
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Part, Snapshot, from_blobs, kinds_of, raw
from choros.training.payload import put, shown
from choros.training.spec import FitConfig, TrainerControl
from choros.training.worker.messages import (
    REPLIES,
    AwaitEnd,
    BatchEnded,
    EndReply,
    EpochEnded,
    GetState,
    RunStateSaved,
    ShowWeights,
    StateReply,
    TrainingBegins,
    WeightsShown,
)
from choros.types import Array

if TYPE_CHECKING:
    import keras


class RemoteCallbackRunner:
    """A ``CallbackRunner`` for rank 0 whose callbacks run in another process."""

    user = True  # also without callbacks: at an epoch's end the model holds that epoch's weights for a moment

    def __init__(self, link: RpcConnection, model: keras.Model, job: FitConfig) -> None:
        self.link, self.model, self.job = link, model, job
        self.epoch: int | None = job.initial_epoch
        self.fetch: Callable[[int | None], None] = lambda epoch: None
        self.metrics: list[float] = []

    def begin(self, epoch: int) -> TrainerControl:
        """Request the callbacks for the beginning of training."""
        return self._ask(TrainingBegins(epoch))

    def batch(self, epoch: int, step: int, logs: dict[str, float]) -> TrainerControl:
        """Request the callbacks of a step."""
        return self._ask(BatchEnded(epoch, step, logs))

    def epoch_end(self, epoch: int, logs: dict[str, float], metrics: list[float]) -> TrainerControl:
        """Request the callbacks of an epoch's end. The weights are sent too, so the caller has them after a failure."""
        self.fetch(epoch)
        return self._ask(EpochEnded(epoch, logs, metrics), True)

    def show_metrics(self, metrics: list[float]) -> None:
        """Store the values of the metrics' variables, which are sent to the callbacks with the weights."""
        self.metrics = metrics

    def end(self) -> None:
        """Do nothing: the caller runs the last callbacks when it has the final weights."""

    def _ask(self, event: object, weights: bool = False) -> TrainerControl:
        header, arrays = self.link.request(header_of(event), shown(self.model) if weights else ())
        while isinstance(reply := REPLIES.decode(header), ShowWeights):  # a callback touches weights
            self.fetch(None)
            header, arrays = self.link.request(header_of(WeightsShown(self.metrics)), shown(self.model))
        self.epoch = reply.epoch
        control: TrainerControl = reply.control
        if control.variables:
            put(self.model, arrays)
        return control


class _RemoteStore:
    """A store for rank 0's ``CheckpointManager`` that sends states to the caller, which writes them."""

    directory = "the process that called fit"

    def __init__(self, dial: Callable[[], RpcConnection]) -> None:
        self._dial = dial
        self._link: RpcConnection | None = None

    def save(self, facts: dict[str, Any], arrays: list[Array]) -> None:
        """Send a state over a separate connection, because callbacks may use the first one at the same time."""
        if self._link is None:
            self._link = self._dial()
        self._link.request(header_of(RunStateSaved(facts, kinds_of(arrays))), raw(arrays))


class _RemoteCheckpoint(Checkpoint):
    """The caller's checkpoint in a rank. Signals of this process count as well as those of the caller."""

    def __init__(self, job: FitConfig, lead: bool, dial: Callable[[], RpcConnection]) -> None:
        schedule = job.checkpoint_schedule or {}
        super().__init__(_RemoteStore.directory, signals=schedule.get("signals", ()))
        self.store = _RemoteStore(dial)  # type: ignore[assignment]
        self._lead, self._dial, self._polls_caller = lead, dial, schedule.get("asks", False)

    @contextmanager
    def listening(self, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Handle the signals within this context. Rank 0 also polls the caller for a request to end, in a thread."""
        with super().listening(then):
            if self._lead and self._polls_caller:
                threading.Thread(target=self._poll_end_request, args=(then,), name="choros-asked", daemon=True).start()
            yield

    def _poll_end_request(self, then: Callable[[], None]) -> None:
        # The connection ends with the run. If the caller has failed, the first connection reports that.
        with suppress(ChorosError, OSError):
            link = self._dial()
            while not ask(link, AwaitEnd(), EndReply).requested:  # the caller replies late (long polling)
                pass
            self._requested = True
            then()


class RemoteCheckpointManager(CheckpointManager):
    """A rank's ``CheckpointManager`` that sends the states to the caller.

    Args:
        job: FitConfig with a schedule of checkpoints.
        rank: int.
        dial: opens a connection with the caller.
        latest: the state to resume from, with the parts that this rank needs; or None.
    """

    def __init__(self, job: FitConfig, rank: int, dial: Callable[[], RpcConnection], latest: Snapshot | None) -> None:
        super().__init__(_RemoteCheckpoint(job, rank == 0, dial))
        self.latest, self._run, self._epochs = latest, {"seed": job.seed}, job.epochs

    def flush_for_exit(self) -> SystemExit:
        """Send all states to the caller, and return the ``SystemExit`` that ends this process."""
        self.flush()
        # Only the caller decides whether the job's script requeues the job, which changes the code
        # (``Checkpoint.code``).
        return SystemExit(AGAIN)


def take_state(link: RpcConnection, rank: int) -> Snapshot | None:
    """Return the state to resume from, with the parts that a rank needs; None if training does not resume."""
    header, arrays = link.request(header_of(GetState()))
    reply = decode(StateReply, header)
    if reply.facts is None:
        return None
    state = Snapshot(reply.facts)
    if reply.part is not None:
        part: Part = from_blobs(reply.part, [array.tobytes() for array in arrays])
        # ``Snapshot.of_rank`` takes shared arrays from rank 0's part. The caller has put them into this one.
        state.parts = {0: part, rank: part}
    return state
