"""The caller's care for workers that train alone: those that die begin anew; what all need to go on is kept."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from choros.errors import WorkerFailedError
from choros.param_server import snapshot
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.recovery import state_of
from choros.training.checkpoint.manager import kept_rate
from choros.training.checkpoint.snapshot import Part, Snapshot, to_blobs
from choros.training.spec import TrainerControl

_HUNG = 0.8  # of the timeout: before others give up waiting for the centre that one holds


class AsyncCheckpointer:
    """Keeps what workers that train alone need to go on; they are not stopped but for a copy of the centre.

    Args:
        centre: a hold on the centre, of a controller or of rank 0; no worker has met it yet.
        board: ControlBlock.
        saver: CheckpointManager.
        job: FitConfig.
        conductor: of the callbacks.
    """

    def __init__(self, centre: Any, board: Any, saver: Any, job: Any, conductor: Any) -> None:
        self.centre, self.board, self.saver, self.job, self.conductor = centre, board, saver, job, conductor
        self.kept, self.steps = time.monotonic(), 0.0
        self.slots_of: Callable[[int], Part] | None = None  # gives what a rank left of its optimizers
        self.ranks = range(1)  # those that it knows of
        if saver.latest is None:
            state_of(centre).set_positions(centre, job.initial_epoch, job.initial_batch)
        else:
            _, groups = saver.latest.parts[0]
            state_of(centre).import_state(centre, groups["header"][0], groups["centre"])
            board.put_back(groups["board"])
            board.order(TrainerControl(learning_rate=kept_rate(saver.latest.facts)))

    def look(self) -> None:
        """Keep the state, if it is time."""
        if self.saver.checkpoint is None:
            return
        rule, now = self.job.keep or {}, time.monotonic()
        steps = self.board.beats().sum() / self.job.workers
        if now - self.kept >= rule.get("seconds", np.inf) or steps - self.steps >= rule.get("batches", np.inf):
            self.kept, self.steps = now, steps
            self.keep()

    def ended(self) -> None:
        """An epoch has ended, and its callbacks have run."""
        if "seconds" not in (self.job.keep or {}):
            self.keep()

    def keep(self, asked: bool = False) -> None:
        """Keep the state as it is now."""
        if self.saver.checkpoint is None:
            return
        begun = time.thread_time()
        header, vectors = state_of(self.centre).export_state(self.centre)
        over = self.conductor.epoch is None
        epoch = self.job.epochs if over else self.conductor.epoch
        board = self.board.whole(epoch - self.job.initial_epoch)
        parts: dict[int, Part] = {0: ({}, {})}
        if self.slots_of is not None:
            parts = {rank: self.slots_of(rank) for rank in self.ranks}
        own, groups = parts[0]
        parts[0] = own, {"centre": vectors, "header": [header], "board": board, **groups}
        stopped = over and self.board.stopped
        facts = {"epoch": epoch, "batch": 0, "over": stopped, "ordered_rate": self.board.ordered_rate}
        self.saver.kept(Snapshot(facts, parts), asked)
        self.saver.busy += time.thread_time() - begun

    def let_go(self) -> None:
        """All have been told to end."""


class AsyncSupervisor(AsyncCheckpointer):
    """Of one run. Nobody waits for a worker that dies: its new process goes on from what it last brought to the centre.

    Args:
        engine: ``LocalRun``, its segments made and no worker told of them.
        centre: a controller's hold on the centre.
    """

    def __init__(self, engine: Any, centre: SharedMemoryParameterServer) -> None:
        super().__init__(centre, engine.board, engine.saver, engine.job, engine.conductor)
        self.near = centre
        self.slots_of, self.ranks = engine.slots_of, engine.ranks
        self.engine, self.mender = engine, engine.mender
        self.hangs = engine.hangs
        self.hung: dict[int, str] = {}  # ranks that were ended here, and why

    def revive(self, rank: int, event: dict[str, Any]) -> bool:
        """Start a new process in the place of a worker that failed; False where the run is to end with it."""
        self.mender.judge(event)
        if not self.mender.retry:
            return False
        engine = self.engine
        place = snapshot.position_of(self.near, rank)
        failure = engine.pool.failure(rank, event)
        if rank in self.hung:
            failure = WorkerFailedError(self.hung.pop(rank), rank=rank, host=failure.host, weights=failure.weights)
        self.mender.count(failure, place, whole=False)
        engine.pool.replace(rank)
        engine.ready.discard(rank)
        message, blobs, fds = engine.work
        job, (head, state) = {**message["job"], "counts_on": True}, to_blobs(engine.slots_of(rank))
        again = {**message, "job": job, "again": True, "state": head, "line": False}
        engine.pool.send(rank, again, [*blobs, *state], fds)
        self.hangs.began_anew(rank)
        return True

    def watch(self, done: dict[int, Any]) -> None:
        """End workers that hang, where they may begin anew; keep the state, if it is time.

        Raises:
            SystemExit: this process was asked to end.
        """
        limit = _HUNG * self.job.timeout
        late = self.hangs.late(limit, done)
        if late and self.mender.left:
            holder = snapshot.lock_holder(self.near)
            rank = holder if holder in late else late[0]
            how = f"{limit:.0f} s, {_HUNG:.0%} of the timeout"
            who = f"worker {rank} of {self.job.workers} (counted from 0) on host {platform.node()}"
            self.hung[rank] = f"{who} had done no step for {how}, and was ended"
            self.hangs.forgive()
            self.engine.pool.end(rank)
        if self.saver.checkpoint is not None and self.saver.checkpoint.asked:
            self.keep(asked=True)
            raise self.saver.leave()
        self.look()
