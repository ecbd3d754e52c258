"""Checkpoints of a synchronous rank: their schedule, their content, and resuming from them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from choros.backends import replica_state
from choros.comm.shared_values import gather_messages
from choros.training.checkpoint.snapshot import Part
from choros.training.spec import WorkerStats

_POLL_SECONDS = 0.25  # between two collective checks whether a checkpoint is due
_MAX_STEPS = 1 << 16  # between two such checks


@dataclass(frozen=True)
class CheckpointPoll:
    """Message of a rank when all ranks decide between two steps whether to save. Rank 0 decides ``due`` and ``wait``.

    Attributes:
        due: bool. Whether a checkpoint is due.
        end_requested: bool. Whether this rank has a request to end training.
        wait: int. Number of steps until the next comparison.
    """

    due: bool
    end_requested: bool
    wait: int


class SyncCheckpointer:
    """Checkpoints of this rank's state, at the same positions as on all other ranks.

    For a schedule in batches or epochs, each rank knows the positions without communication. A schedule in seconds
    uses the clock of rank 0, and a signal may reach any rank only. So from time to time, after an exchange, the ranks
    compare both in a collective call (``poll_ranks``).

    Args:
        loop: ``SyncLoop``.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.run = loop, loop.run
        self.schedule: dict[str, Any] = self.run.job.checkpoint_schedule or {}
        self.asks = self.schedule.get("asks", False)
        self.seconds = self.schedule.get("seconds", 0.0)
        self.saved_at = self.polled_at = time.monotonic()
        self.wait = self.waited = 1

    def stepped(self, epoch: int, batch: int) -> None:
        """Save the state if a checkpoint is due after ``batch`` batches of the epoch."""
        batches = self.schedule.get("batches")
        if batches is not None and batch % batches == 0:
            self.save(epoch, batch)
        # Only right after an exchange, where the ranks have just waited for each other: there a small gather is cheap.
        elif (self.asks or self.seconds) and not self.loop.schedule.pending:
            self.wait -= 1
            if self.wait <= 0:
                due, requested = self.poll_ranks()
                if due or requested:
                    self.save(epoch, batch, end_requested=requested)

    def due(self, batch: int) -> bool:
        """Return whether ``stepped`` may save the state after ``batch`` batches. The result is equal on all ranks."""
        batches = self.schedule.get("batches")
        by_clock = bool(self.asks or self.seconds) and self.wait <= 1
        return by_clock or (batches is not None and batch % batches == 0)

    def ended(self, epoch: int, over: bool) -> None:
        """Save the state at an epoch's end, after its callbacks, if a checkpoint is due.

        Args:
            epoch: the epoch that has ended.
            over: whether a callback has ended training.
        """
        due, requested = self.poll_ranks() if self.asks or self.seconds else (False, False)
        if due or requested or over or not self.seconds or epoch + 1 == self.run.job.epochs:
            self.save(epoch + 1, 0, over, requested)

    def poll_ranks(self) -> tuple[bool, bool]:
        """Return whether a checkpoint is due by rank 0's clock, and whether any rank has a request to end training.

        Collective: every rank must call it. Rank 0 also sets the number of steps until the next call.
        """
        now, begun = time.monotonic(), time.thread_time()
        step_seconds = (now - self.polled_at) / self.waited
        self.polled_at = now
        wait = max(1, min(_MAX_STEPS, int(_POLL_SECONDS / max(step_seconds, 1e-9))))
        # Only rank 0's value counts. The ranks' clocks differ, and all must save after the same step.
        due = bool(self.seconds) and now - self.saved_at >= self.seconds
        local_poll = CheckpointPoll(due, bool(self.run.control_block.end_requested), wait)
        polls = gather_messages(self.run.group, local_poll)
        # All ranks take rank 0's number, else they would make the next collective call after different steps.
        self.wait = self.waited = polls[0].wait
        self.run.stats.keeping += time.thread_time() - begun
        return polls[0].due, any(poll.end_requested for poll in polls)

    def save(self, epoch: int, batch: int, over: bool = False, end_requested: bool = False) -> None:
        """Save the state from which training resumes at this batch of this epoch."""
        self.loop.steps.run_waiting()
        self.saved_at, begun = time.monotonic(), time.thread_time()
        if batch and self.run.group.size > 1:  # at an epoch's end the ranks have just compared their weights
            self.loop.same(epoch, batch - 1)
        self.run.reporter.save_state(self.part(epoch, batch, over), end_requested)
        self.run.stats.keeping += time.thread_time() - begun

    def part(self, epoch: int, batch: int, over: bool) -> Part:
        """Return this rank's state, without the arrays that are equal on all ranks and saved by rank 0."""
        loop, run = self.loop, self.run
        facts, groups = replica_state.take(
            loop.replica, whole=not (loop.gradients and run.rank), ahead=bool(run.algorithm.momentum)
        )
        if loop.exchange is not None and run.rank == 0:
            exchange_state = loop.exchange.state()
            groups["meeting"] = [exchange_state["center"], exchange_state["seen"], *exchange_state["memory"]]
            if not batch and loop.trial is not None:  # callbacks saw this center, so a resumed run shows it to them
                groups["shown"] = [loop.trial]
        stats = run.counted()
        rank_facts = {
            "epoch": epoch,
            "batch": batch,
            "over": over,
            "pending": loop.schedule.pending,
            "rows": loop.rows,
            "epoch_rows": stats.rows - loop.rows_before,
            "stats": stats.json(),
            "replica": facts,
        }
        return rank_facts, groups

    @staticmethod
    def restore(loop: Any, part: Part, rate: float | None) -> None:
        """Resume from a saved state.

        Args:
            loop: ``SyncLoop``, before its first epoch.
            part: this rank's state.
            rate: the learning rate that callbacks have set since, or None.
        """
        facts, groups = part
        replica_state.put(loop.replica, facts["replica"], groups)
        # After ``put``, which restores the rate of the checkpoint's time.
        if rate is not None:
            loop.replica.learning_rate = rate
        if loop.exchange is not None:
            center, seen, *memory = groups["meeting"]
            loop.exchange.restore({"center": center, "seen": seen, "memory": memory, "exchanges": 0, "seconds": 0.0})
        loop.schedule.pending, loop.rows = facts["pending"], facts["rows"]
        if loop.run.job.continues_counts:
            loop.run.stats = WorkerStats(**facts["stats"])
            loop.run.earlier_seconds = loop.run.stats.seconds
        loop.rows_before = loop.run.stats.rows - facts["epoch_rows"]
