"""The noticeboard and the mail of a run as ranks of other hosts see them: through the host that has them.

Each question may be asked twice, as the server may end before it has answered: then nothing is added or left twice.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from choros.training.async_control.center_snapshots import FarSnapshots
from choros.training.async_control.center_snapshots import answer as answer_snapshots
from choros.training.async_control.control_block import ControlBlock
from choros.training.async_control.epoch_log import EpochLog, Line, read_lines
from choros.types import Array

_FRESH = 0.05  # seconds for which the orders that were read hold
_NONE = np.zeros(0)


class RemoteControlBlock:
    """A ``ControlBlock`` for a worker of another host, over a channel.

    Args:
        line: Channel to the host that has the board.
    """

    def __init__(self, line: Any) -> None:
        self._line, self._version, self._read = line, 0.0, 0.0
        self._head: list[float] = []
        self._rank, self._beats, self._asks = 0, 0, False
        self._own: tuple[tuple[int, int], int, list[float], Array] | None = None  # what ``leave`` was given last

    def _orders(self, fresh: bool = False) -> list[float]:
        if fresh or not self._head or time.monotonic() - self._read > _FRESH:
            told = {"op": "head", "rank": self._rank, "beats": self._beats, "asks": self._asks}
            self._head = self._line.request(told)[0]["head"]
            self._read = time.monotonic()
        return self._head

    def beat(self, rank: int) -> None:
        """Count a step, which is told with the next question."""
        self._rank, self._beats = rank, self._beats + 1

    def ask(self) -> None:
        """Ask for a checkpoint and the end, with the next question: this is called within a signal's handler."""
        self._asks = True

    @property
    def code(self) -> int | None:
        """With which code ranks are to end their process; None: they are not."""
        code = self._orders()[6]
        return int(code) - 1 if code else None

    @property
    def halted(self) -> int:
        """The number of the rest that is asked for, or 0."""
        return int(self._orders()[8])

    def rest(self, rank: int, number: float) -> None:
        """Say that this rank does not go to the centre before that halt is over, and where it is; look anew then."""
        place, iterations, tally, state = self._own or ((-1, 0), 0, [], _NONE)
        told = {"op": "rest", "rank": rank, "number": number, "place": place, "tally": tally, "iterations": iterations}
        self._line.request(told, [state])
        self._read = 0.0

    def leave(self, rank: int, place: tuple[int, int], iterations: int, tally: list[float], state: Array) -> None:
        """Keep what ``ControlBlock.leave`` takes of this rank for the next rest."""
        self._own = place, iterations, tally, np.array(state, np.float64)

    def left(self, rank: int) -> tuple[tuple[int, int], int, Array, Array] | None:
        """Return what this rank left last, in another process."""
        told, arrays = self._line.request({"op": "left", "rank": rank})
        if not arrays:
            return None
        epoch, batch = told["place"]
        return (int(epoch), int(batch)), int(told["iterations"]), arrays[0].copy(), arrays[1].copy()

    def ended(self, epoch: int, rank: int) -> bool:
        """Tell whether a rank has added to an epoch."""
        return bool(self._line.request({"op": "ended", "epoch": epoch, "rank": rank})[0]["ended"])

    def complete(self, epoch: int) -> bool:
        """Tell whether all ranks have added to an epoch."""
        return bool(self._line.request({"op": "complete", "epoch": epoch})[0]["complete"])

    def beats(self) -> Array:
        """Steps done by each rank, as far as the host of the board knows."""
        self._orders(fresh=True)  # brings this rank's own
        beats: Array = self._line.request({"op": "beats"})[1][0].copy()
        return beats

    @property
    def stopped(self) -> bool:
        """True if rank 0's callbacks asked to stop."""
        return bool(self._orders()[1])

    @property
    def last(self) -> int:
        """After a stop, the first epoch whose end is not reported."""
        return int(self._orders()[4])

    @property
    def opened(self) -> int:
        """The latest epoch that may begin, of workers that wait for all at an epoch's end."""
        return int(self._orders()[7])

    def rate(self) -> float | None:
        """Return the learning rate of orders given since this process last looked, or None."""
        head = self._orders()
        if head[0] == self._version:
            return None
        self._version = head[0]
        return head[2] if head[9] else None

    def add(self, epoch: int, rank: int, train: Array, validation: Array) -> bool:
        """Add a rank's metric state to its epoch; True for the rank that makes the sum complete."""
        return bool(self._line.request({"op": "add", "epoch": epoch, "rank": rank}, [train, validation])[0]["complete"])

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums: metric states of training, and figures of validation."""
        train, validation = self._line.request({"op": "sums", "epoch": epoch})[1]
        return train.copy(), validation.copy()

    def close(self) -> None:
        """Hold nothing: the channel is the centre's."""


class RemoteEpochLog:
    """A ``EpochLog`` for a worker of another host.

    Args:
        line: Channel to the host that has it.
        watched: bool. Whether callbacks read the center of epochs' ends.
    """

    def __init__(self, line: Any, watched: bool = False) -> None:
        self._line, self._taken = line, 0
        self.snapshots = FarSnapshots(line) if watched else None

    def leave(self, epoch: int, logs: dict[str, float], seconds: float, held: list[float]) -> None:
        """Leave one line."""
        self._line.request({"op": "leave", "epoch": epoch, "logs": logs, "seconds": seconds, "held": held})

    def take(self) -> list[Line]:
        """Return what has come since the last time."""
        text = str(self._line.request({"op": "since", "taken": self._taken})[0]["text"]).encode()
        self._taken += len(text)
        return read_lines(text)

    def close(self) -> None:
        """Hold nothing."""


def answer(board: ControlBlock, mail: EpochLog, head: dict[str, Any], arrays: list[Array]) -> tuple[Any, list[Array]]:
    """Answer one question of a ``RemoteControlBlock`` or a ``RemoteEpochLog``; None where it is none of theirs.

    Args:
        board: this host's.
        mail: this host's.
        head: what is asked.
        arrays: of a metric's sums.
    """
    op = head["op"]
    if op == "head":
        if head["beats"]:
            board.beaten(int(head["rank"]), int(head["beats"]))
        if head["asks"]:
            board.ask()
        return {"head": board.head()}, []
    if op == "beats":
        return {}, [board.beats()]
    if op == "rest":
        rank = int(head["rank"])
        if head["tally"]:
            epoch, batch = head["place"]
            board.leave(rank, (int(epoch), int(batch)), int(head["iterations"]), head["tally"], arrays[0])
        board.rest(rank, float(head["number"]))
        return {}, []
    if op == "left":
        left = board.left(int(head["rank"]))
        return ({"place": left[0], "iterations": left[1]}, list(left[2:])) if left else ({}, [])
    if op == "ended":
        return {"ended": board.ended(int(head["epoch"]), int(head["rank"]))}, []
    if op == "complete":
        return {"complete": board.complete(int(head["epoch"]))}, []
    if op == "add":
        parts = (np.asarray(a, np.float64) for a in arrays)
        return {"complete": board.add(int(head["epoch"]), int(head["rank"]), *parts)}, []
    if op == "sums":
        return {}, list(board.sums(int(head["epoch"])))
    if op == "leave":
        if all(line[0] != head["epoch"] for line in read_lines(mail.since(0))):  # one rank leaves an epoch's
            mail.leave(int(head["epoch"]), head["logs"], float(head["seconds"]), head["held"])
        return {}, []
    if op == "since":
        return {"text": mail.since(int(head["taken"])).decode()}, []
    if mail.snapshots is not None:
        return answer_snapshots(mail.snapshots, head, arrays)
    return None, []
