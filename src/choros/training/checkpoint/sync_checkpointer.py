"""The state of a rank that trains synchronously: when it is kept, what is kept, and going on from it."""

from __future__ import annotations

import json
import time
from typing import Any

from choros.backends import replica_state
from choros.training.checkpoint.snapshot import Part
from choros.training.spec import WorkerStats

_LOOK = 0.25  # seconds between two times that the ranks tell each other whether it is time
_MOST = 1 << 16


class SyncCheckpointer:
    """Leaves this rank's state at places at which all the others leave theirs.

    After so many batches, and at the end of an epoch, all know by themselves that it is time. The clock is rank 0's and
    a signal may have come to any rank: so now and then, where they have just met anyway, all tell each other.

    Args:
        loop: ``SyncLoop``.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.run = loop, loop.run
        self.rule: dict[str, Any] = self.run.job.keep or {}
        self.asks = self.rule.get("asks", False)
        self.seconds = self.rule.get("seconds", 0.0)
        self.saved = self.looked = time.monotonic()
        self.wait = self.waited = 1

    def stepped(self, epoch: int, batch: int) -> None:
        """So many batches of the epoch are done: leave the state, if it is time."""
        each = self.rule.get("batches")
        if each is not None and batch % each == 0:
            self.leave(epoch, batch)
        elif (self.asks or self.seconds) and not self.loop.schedule.pending:
            self.wait -= 1
            if self.wait <= 0:
                due, asked = self.look()
                if due or asked:
                    self.leave(epoch, batch, asked=asked)

    def due(self, batch: int) -> bool:
        """Tell whether ``stepped`` may leave the state after so many batches; the same on all ranks."""
        each = self.rule.get("batches")
        by_clock = bool(self.asks or self.seconds) and self.wait <= 1
        return by_clock or (each is not None and batch % each == 0)

    def ended(self, epoch: int, over: bool) -> None:
        """An epoch is done, and its callbacks have run: leave the state, if it is time.

        Args:
            epoch: which.
            over: whether a callback has ended the training.
        """
        due, asked = self.look() if self.asks or self.seconds else (False, False)
        if due or asked or over or not self.seconds or epoch + 1 == self.run.job.epochs:
            self.leave(epoch + 1, 0, over, asked)

    def look(self) -> tuple[bool, bool]:
        """All tell each other: whether rank 0's clock says that it is time, and whether anyone was asked to end."""
        now, begun = time.monotonic(), time.thread_time()
        each = (now - self.looked) / self.waited
        self.looked = now
        wait = max(1, min(_MOST, int(_LOOK / max(each, 1e-9))))
        due = bool(self.seconds) and now - self.saved >= self.seconds
        mine = json.dumps([due, bool(self.run.board.asked), wait]).encode()
        said = [json.loads(text) for text in self.run.group.gather(mine)]
        self.wait = self.waited = said[0][2]
        self.run.tally.keeping += time.thread_time() - begun
        return said[0][0], any(asked for _, asked, _ in said)

    def leave(self, epoch: int, batch: int, over: bool = False, asked: bool = False) -> None:
        """Leave the state of which training goes on with this batch of this epoch."""
        self.saved, begun = time.monotonic(), time.thread_time()
        if batch and self.run.group.size > 1:  # at an epoch's end they have just been compared
            self.loop.same(epoch, batch - 1)
        self.run.reporter.keep(self.part(epoch, batch, over), asked)
        self.run.tally.keeping += time.thread_time() - begun

    def part(self, epoch: int, batch: int, over: bool) -> Part:
        """Return all that this rank holds, but for what rank 0 has too."""
        loop, run = self.loop, self.run
        facts, groups = replica_state.take(
            loop.replica, whole=not (loop.gradients and run.rank), ahead=bool(run.algorithm.momentum)
        )
        if loop.meeting is not None and run.rank == 0:
            held = loop.meeting.state()
            groups["meeting"] = [held["centre"], held["seen"], *held["memory"]]
            if not batch and loop.trial is not None:  # callbacks saw this center, and find it again after a resume
                groups["shown"] = [loop.trial]
        tally = run.counted()
        place = {
            "epoch": epoch,
            "batch": batch,
            "over": over,
            "pending": loop.schedule.pending,
            "rows": loop.rows,
            "epoch_rows": tally.rows - loop.rows_before,
            "tally": tally.json(),
            "replica": facts,
        }
        return place, groups

    @staticmethod
    def go_on(loop: Any, part: Part, rate: float | None) -> None:
        """Go on from a part.

        Args:
            loop: ``SyncLoop``, at its beginning.
            part: what this rank left.
            rate: the learning rate that callbacks have set since, or None.
        """
        facts, groups = part
        replica_state.put(loop.replica, facts["replica"], groups)
        if rate is not None:
            loop.replica.learning_rate = rate
        if loop.meeting is not None:
            centre, seen, *memory = groups["meeting"]
            loop.meeting.restore({"centre": centre, "seen": seen, "memory": memory, "exchanges": 0, "seconds": 0.0})
        loop.schedule.pending, loop.rows = facts["pending"], facts["rows"]
        if loop.run.job.counts_on:
            loop.run.tally = WorkerStats(**facts["tally"])
            loop.run.before = loop.run.tally.seconds
        loop.rows_before = loop.run.tally.rows - facts["epoch_rows"]
