"""Checkpoints of asynchronous runs, and the caller's supervisor, which restarts asynchronous workers that fail."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.errors import WorkerFailedError
from choros.launch.process.failure_report import RankFailure
from choros.param_server import center_state
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.recovery import state_of
from choros.training.checkpoint.manager import kept_rate
from choros.training.checkpoint.snapshot import Part, Snapshot
from choros.training.spec import TrainerControl
from choros.types import Array

if TYPE_CHECKING:
    from choros.comm.group import ParameterServer
    from choros.training.callback_runner import CallbackRunner
    from choros.training.checkpoint.manager import CheckpointManager
    from choros.training.spec import FitConfig

_HUNG_SHARE = 0.8  # of the timeout: a hung worker that holds the center's lock must end before others time out


class AsyncCheckpointer:
    """Checkpoints of an asynchronous run. Workers continue, but cannot exchange while the center is copied.

    Args:
        center: the parameter server, as the caller or rank 0 sees it, before the first exchange.
        control_block: ControlBlock.
        checkpoints: CheckpointManager.
        job: FitConfig.
        callbacks: CallbackRunner.
    """

    def __init__(
        self,
        center: ParameterServer,
        control_block: Any,
        checkpoints: CheckpointManager,
        job: FitConfig,
        callbacks: CallbackRunner,
    ) -> None:
        self.center = center
        self.control_block = control_block
        self.checkpoints = checkpoints
        self.job = job
        self.callbacks = callbacks
        self.saved_at, self.saved_steps = time.monotonic(), 0.0
        self.slots_of: Callable[[int], Part] | None = None  # returns the optimizer's state of a rank
        self.ranks = range(1)  # the ranks whose optimizer's state is saved
        if checkpoints.latest is None:
            # A worker that fails before its first exchange must find a position to resume from.
            state_of(center).set_positions(center, job.initial_epoch, job.initial_batch)
        else:
            _, groups = checkpoints.latest.parts[0]
            state_of(center).import_state(center, groups["header"][0], groups["center"])
            control_block.import_state(groups["control_block"])
            # Workers begin with the rate of their optimizer. They poll the control block, so they take the saved rate
            # from it.
            control_block.publish(TrainerControl(learning_rate=kept_rate(checkpoints.latest.facts)))

    def poll(self) -> None:
        """Save the state if a checkpoint is due by seconds or batches."""
        if self.checkpoints.checkpoint is None:
            return
        schedule, now = self.job.checkpoint_schedule or {}, time.monotonic()
        steps = self.control_block.step_counts().sum() / self.job.workers
        time_is_over = now - self.saved_at >= schedule.get("seconds", np.inf)
        if time_is_over or steps - self.saved_steps >= schedule.get("batches", np.inf):
            self.saved_at, self.saved_steps = now, steps
            self.save()

    def ended(self) -> None:
        """Save the state after the callbacks of an epoch's end, unless the schedule is in seconds."""
        if "seconds" not in (self.job.checkpoint_schedule or {}):
            self.save()

    def save(self, end_requested: bool = False) -> None:
        """Save the current state. ``end_requested``: the end of training is requested.

        A fit that has no epoch to train saves nothing: its number of epochs may be below that of the checkpoint.
        """
        if self.checkpoints.checkpoint is None or self.job.initial_epoch >= self.job.epochs:
            return
        begun = time.thread_time()
        # No worker commits an exchange while the center and the saved positions are copied, so each worker's metrics
        # are those of its position in the center. The metrics of ended epochs are copied later. A worker may exchange
        # and end an epoch between the two copies. Then it repeats the end of that epoch after a resume, which ``add``
        # ignores. In the other order it would resume after an epoch that the control block does not count as ended,
        # and that epoch would never be complete.
        positions: list[Array] = []
        header, vectors = state_of(self.center).export_state(
            self.center, lambda: positions.extend(self.control_block.export_positions())
        )
        callback_epoch = self.callbacks.epoch
        finished = callback_epoch is None
        epoch = self.job.epochs if callback_epoch is None else callback_epoch
        control_block = [*positions, *self.control_block.export_metrics(epoch - self.job.initial_epoch)]
        parts: dict[int, Part] = {0: ({}, {})}
        if self.slots_of is not None:
            parts = {rank: self.slots_of(rank) for rank in self.ranks}
        state, groups = parts[0]
        parts[0] = state, {"center": vectors, "header": [header], "control_block": control_block, **groups}
        stopped = finished and self.control_block.stopped
        # "epoch" is that of the callbacks. Each worker's position, which may be in an earlier or later epoch, is in the
        # center's header (center_state.position_of).
        facts = {"epoch": epoch, "batch": 0, "over": stopped, "ordered_rate": self.control_block.published_rate}
        self.checkpoints.store_state(Snapshot(facts, parts), end_requested)
        self.checkpoints.busy += time.thread_time() - begun

    def wait_for_exits(self) -> None:
        """Wait until the ranks have seen the exit code. Nothing to do on one host."""


class AsyncSupervisor(AsyncCheckpointer):
    """The supervisor of one local asynchronous run. A failed worker is restarted while the other workers continue.

    The new process resumes from the worker's last exchange.

    Args:
        run: ``LocalRun``, with its segments created and no job sent yet.
        center: the parameter server, as the caller sees it.
    """

    def __init__(self, run: Any, center: SharedMemoryParameterServer) -> None:
        super().__init__(center, run.control_block, run.checkpoints, run.job, run.callbacks)
        self.local_center = center
        self.slots_of, self.ranks = run.slots_of, run.ranks
        self.run, self.restart_policy = run, run.restart_policy
        self.hangs = run.hangs
        self.hung: dict[int, str] = {}  # ranks that this supervisor has ended, with the reason

    def revive(self, rank: int, report: RankFailure) -> bool:
        """Replace a failed worker by a new process. Return False if the run must end because of the failure."""
        # The whole fit then starts again with new workers, and this does not count as a restart.
        if self.restart_policy.was_idle(rank, report):
            return False
        self.restart_policy.judge(report)
        if not self.restart_policy.retry:
            return False
        run = self.run
        position = center_state.position_of(self.local_center, rank)
        failure = run.pool.failure(rank, report)
        # This supervisor has killed the process, so its signal is not the reason to report.
        if rank in self.hung:
            failure = WorkerFailedError(self.hung.pop(rank), rank=rank, host=failure.host, weights=failure.weights)
        self.restart_policy.count(failure, position, all_ranks=False)
        run.pool.replace(rank)
        # The new process reports that it is ready, as at the start of a run.
        run.ready.discard(rank)
        restart = replace(run.task, job=replace(run.task.job, continues_counts=True), resumes=True)
        run.send_task(rank, restart, run.slots_of(rank))
        self.hangs.process_restarted(rank)
        return True

    def watch(self, done: dict[int, Any]) -> None:
        """End a worker that hangs, if a restart is left, and save the state if a checkpoint is due.

        Raises:
            SystemExit: the end of this process was requested; the state is saved.
        """
        limit = _HUNG_SHARE * self.job.timeout
        hung_ranks = self.hangs.overdue(limit, done)
        if hung_ranks and self.restart_policy.left:
            holder = center_state.lock_holder(self.local_center)
            # A rank that hangs while it holds the center's lock makes others late too: end the cause, not one that
            # waits.
            rank = holder if holder in hung_ranks else hung_ranks[0]
            limit_text = f"{limit:.0f} s, {_HUNG_SHARE:.0%} of the timeout"
            worker_name = f"worker {rank} of {self.job.workers} (counted from 0) on host {platform.node()}"
            self.hung[rank] = f"{worker_name} made no step for {limit_text}, and was ended"
            # The others may have waited for that lock. They get the whole time again.
            self.hangs.restart_clock()
            self.run.pool.end(rank)
        if self.checkpoints.checkpoint is not None and self.checkpoints.checkpoint.asked:
            self.save(end_requested=True)
            raise self.checkpoints.flush_for_exit()
        self.poll()
