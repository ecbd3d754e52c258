"""A rank's access to the process that called ``fit``: its callbacks and its checkpoint, over a connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from choros.comm.tcp.rpc import RpcConnection
from choros.errors import AGAIN, ChorosError
from choros.training.checkpoint import Checkpoint
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Part, Snapshot, from_blobs, kinds_of, raw
from choros.training.payload import put, shown
from choros.training.spec import FitConfig, TrainerControl
from choros.types import Array


class RemoteCallbackRunner:
    """A ``CallbackRunner`` for rank 0 whose callbacks run in another process."""

    user = True  # also without callbacks: the model takes the weights of an epoch's end, and then what it trains

    def __init__(self, line: RpcConnection, model: Any, job: FitConfig) -> None:
        self.line, self.model, self.job = line, model, job
        self.epoch: int | None = job.initial_epoch
        self.fetch: Callable[[int | None], None] = lambda epoch: None
        self.held: list[float] = []

    def begin(self, epoch: int) -> TrainerControl:
        """Training begins."""
        return self._ask({"event": "begin", "epoch": epoch})

    def batch(self, epoch: int, step: int, logs: dict[str, float]) -> TrainerControl:
        """A step is done."""
        return self._ask({"event": "batch", "epoch": epoch, "step": step, "logs": logs})

    def epoch_end(self, epoch: int, logs: dict[str, float], held: list[float]) -> TrainerControl:
        """An epoch has ended; its weights go along, so that the caller has them whatever happens."""
        self.fetch(epoch)
        return self._ask({"event": "epoch_end", "epoch": epoch, "logs": logs, "held": held}, True)

    def show_metrics(self, held: list[float]) -> None:
        """Keep what metrics hold, which goes to the callbacks with the weights."""
        self.held = held

    def end(self) -> None:
        """The caller ends training when it has the last weights."""

    def _ask(self, head: dict[str, Any], weights: bool = False) -> TrainerControl:
        told, given = self.line.request(head, shown(self.model) if weights else ())
        while told.get("show"):  # a callback touches weights
            self.fetch(None)
            told, given = self.line.request({"event": "weights", "held": self.held}, shown(self.model))
        self.epoch = told["epoch"]
        orders = TrainerControl(**told["orders"])
        if orders.variables:
            put(self.model, given)
        return orders


class _FarStore:
    """A ``Store`` for rank 0's ``CheckpointManager`` that sends the states; the caller keeps and writes them."""

    directory = "the process that called fit"

    def __init__(self, dial: Callable[[], RpcConnection]) -> None:
        self._dial = dial
        self._line: RpcConnection | None = None

    def save(self, facts: dict[str, Any], arrays: list[Array]) -> None:
        """Send a state, by a line of its own: the other one is for the callbacks, meanwhile."""
        if self._line is None:
            self._line = self._dial()
        self._line.request({"event": "state", "facts": facts, "kinds": kinds_of(arrays)}, raw(arrays))


class _FarCheckpoint(Checkpoint):
    """The caller's checkpoint as a rank has it: signals that this process gets count as well as the caller's."""

    def __init__(self, job: FitConfig, lead: bool, dial: Callable[[], RpcConnection]) -> None:
        rule = job.keep or {}
        super().__init__(_FarStore.directory, signals=rule.get("signals", ()))
        self.store = _FarStore(dial)  # type: ignore[assignment]
        self._lead, self._dial, self._asks = lead, dial, rule.get("asks", False)

    @contextmanager
    def listening(self, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Listen; rank 0 also to what the caller was asked for."""
        with super().listening(then):
            if self._lead and self._asks:
                threading.Thread(target=self._hear, args=(then,), name="choros-asked", daemon=True).start()
            yield

    def _hear(self, then: Callable[[], None]) -> None:
        with suppress(ChorosError, OSError):
            line = self._dial()
            while not line.request({"ask": "end"})[0]["asked"]:  # the caller takes its time to answer
                pass
            self._told = True
            then()


class RemoteCheckpointManager(CheckpointManager):
    """A rank's ``CheckpointManager``, of which the states go to the caller.

    Args:
        job: FitConfig, which is to keep states.
        rank: int.
        dial: makes a line to the caller.
        latest: the state to go on from, as far as this rank needs it; or None.
    """

    def __init__(self, job: FitConfig, rank: int, dial: Callable[[], RpcConnection], latest: Snapshot | None) -> None:
        super().__init__(_FarCheckpoint(job, rank == 0, dial))
        self.latest, self._run, self._epochs = latest, {"seed": job.seed}, job.epochs

    def leave(self) -> SystemExit:
        """Return what ends this process, once the caller has the state."""
        self.flush()
        return SystemExit(AGAIN)


def take_state(line: RpcConnection, rank: int) -> Snapshot | None:
    """Return the state to go on from, as far as a rank needs it; None where training begins."""
    told, arrays = line.request({"ask": "state"})
    if told["facts"] is None:
        return None
    state = Snapshot(told["facts"])
    if told["part"] is not None:
        part: Part = from_blobs(told["part"], [array.tobytes() for array in arrays])
        state.parts = {0: part, rank: part}
    return state
