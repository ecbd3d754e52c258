"""The noticeboard and the mail of a run as ranks of other hosts see them: through the host that has them.

Each question may be asked twice, as the server may end before it has answered: then nothing is added or left twice.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from choros.training.mail import Line, Mail, read_lines
from choros.training.noticeboard import Noticeboard
from choros.types import Array

_FRESH = 0.05  # seconds for which the orders that were read hold


class FarBoard:
    """What ``Noticeboard`` is to a worker, asked for over a channel.

    Args:
        line: Channel to the host that has the board.
    """

    def __init__(self, line: Any) -> None:
        self._line, self._version, self._read = line, 0.0, 0.0
        self._head: list[float] = []

    def _orders(self) -> list[float]:
        if not self._head or time.monotonic() - self._read > _FRESH:
            self._head = self._line.ask({"op": "head"})[0]["head"]
            self._read = time.monotonic()
        return self._head

    def beat(self, rank: int) -> None:
        """Say nothing: nobody watches the steps of ranks that are not the caller's children."""

    @property
    def stopped(self) -> bool:
        """Whether rank 0's callbacks asked to stop."""
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
        return head[2] or None

    def add(self, epoch: int, rank: int, train: Array, validation: Array) -> bool:
        """Add a rank's metric state to its epoch; True for the rank that makes the sum complete."""
        return bool(self._line.ask({"op": "add", "epoch": epoch, "rank": rank}, [train, validation])[0]["complete"])

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums: metric states of training, and figures of validation."""
        train, validation = self._line.ask({"op": "sums", "epoch": epoch})[1]
        return train.copy(), validation.copy()

    def close(self) -> None:
        """Hold nothing: the channel is the centre's."""


class FarMail:
    """What ``Mail`` is to a worker of another host.

    Args:
        line: Channel to the host that has it.
    """

    def __init__(self, line: Any) -> None:
        self._line, self._taken = line, 0

    def leave(self, epoch: int, logs: dict[str, float], seconds: float) -> None:
        """Leave one line."""
        self._line.ask({"op": "leave", "epoch": epoch, "logs": logs, "seconds": seconds})

    def take(self) -> list[Line]:
        """Return what has come since the last time."""
        text = str(self._line.ask({"op": "since", "taken": self._taken})[0]["text"]).encode()
        self._taken += len(text)
        return read_lines(text)

    def close(self) -> None:
        """Hold nothing."""


def answer(board: Noticeboard, mail: Mail, head: dict[str, Any], arrays: list[Array]) -> tuple[Any, list[Array]]:
    """Answer one question of a ``FarBoard`` or a ``FarMail``; None where it is none of theirs.

    Args:
        board: this host's.
        mail: this host's.
        head: what is asked.
        arrays: of a metric's sums.
    """
    op = head["op"]
    if op == "head":
        return {"head": board.head()}, []
    if op == "add":
        parts = (np.asarray(a, np.float64) for a in arrays)
        return {"complete": board.add(int(head["epoch"]), int(head["rank"]), *parts)}, []
    if op == "sums":
        return {}, list(board.sums(int(head["epoch"])))
    if op == "leave":
        if all(epoch != head["epoch"] for epoch, _, _ in read_lines(mail.since(0))):  # one rank leaves an epoch's
            mail.leave(int(head["epoch"]), head["logs"], float(head["seconds"]))
        return {}, []
    if op == "since":
        return {"text": mail.since(int(head["taken"])).decode()}, []
    return None, []
