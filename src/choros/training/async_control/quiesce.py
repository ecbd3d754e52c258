"""Keeping a centre between hosts: all ranks rest for a moment, between two steps, while rank 0 takes every part."""

from __future__ import annotations

import sys
import time
from typing import Any

from choros.errors import CommTimeoutError
from choros.training.async_control.control_block import DONE
from choros.training.async_control.supervisor import AsyncCheckpointer

_LOOK = 0.01  # seconds between two looks
_COME = 60.0  # seconds in which all are at rest: a step or a validation may be going on
_GO = 5.0  # seconds in which all have seen that they are to end


class ShardedCheckpointer(AsyncCheckpointer):
    """Rank 0's. Where the others do not come to rest in time, nothing is kept this time, which is told."""

    number, told = 0, False

    def keep(self, asked: bool = False) -> None:
        """Keep the state as it is now; where somebody asked for the end, all rest until they are told to."""
        if self.saver.checkpoint is None:
            return
        self.number += 1
        self.board.halt(self.number)
        late = self._late(self.number, min(_COME, 0.5 * self.job.timeout))
        if not late:
            super().keep(asked)
        elif not self.told:
            self.told = True
            text = f"choros: ranks {late} are still in a step or a validation: the state is kept a later time"
            print(text, file=sys.stderr, flush=True)
        if not asked:
            self.board.halt(0)

    def let_go(self) -> None:
        """All have been told to end: return when they have seen it, as this rank's host tells them."""
        self._late(DONE, _GO)

    def _late(self, number: float, seconds: float) -> list[int]:
        """Wait for the others; return those that have not come."""
        end = time.monotonic() + seconds
        while True:
            late = [rank for rank in range(1, self.job.workers) if self.board.rests(rank) < number]
            if not late or time.monotonic() > end:
                return late
            time.sleep(_LOOK)


class QuiesceClient:
    """The work of the other ranks.

    Args:
        board: ControlBlock, or RemoteControlBlock.
        rank: int. This rank.
        timeout: float. Seconds that a rest may take.
    """

    def __init__(self, board: Any, rank: int, timeout: float) -> None:
        self.board, self.rank, self.timeout = board, rank, timeout

    def look(self) -> None:
        """Rest, if that is asked for.

        Raises:
            CommTimeoutError: it does not end.
        """
        number, end = self.board.halted, time.monotonic() + self.timeout
        if not number:
            return
        self.board.rest(self.rank, number)
        while self.board.halted == number and self.board.code is None:
            if time.monotonic() > end:
                raise CommTimeoutError(f"rank 0 has been keeping the state of the centre for {self.timeout:g} s.")
            time.sleep(_LOOK)

    def done(self) -> None:
        """Go to the centre no more."""
        self.board.rest(self.rank, DONE)
