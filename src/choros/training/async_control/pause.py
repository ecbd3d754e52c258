"""Saving a center that is divided among hosts: all ranks pause between two steps while rank 0 reads every part.

Without the pause, an exchange could change one part after rank 0 has read it and another part before.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from choros.comm.shm.group_header import format_ranks
from choros.errors import CommTimeoutError
from choros.training.async_control.control_block import DONE
from choros.training.async_control.supervisor import AsyncCheckpointer

logger = logging.getLogger(__name__)

_LOOK = 0.01  # seconds between two polls
_COME = 60.0  # seconds to wait until all ranks pause; each first ends its step or validation
_GO = 5.0  # seconds to wait until all ranks have seen the exit code


class ShardedCheckpointer(AsyncCheckpointer):
    """Checkpoints by rank 0. If other ranks do not pause in time, nothing is saved, and a warning names these ranks."""

    number, warned = 0, False

    def save(self, asked: bool = False) -> None:
        """Save the current state. If the end is requested (``asked``), the ranks stay paused until they end."""
        if self.checkpoints.checkpoint is None:
            return
        self.number += 1
        self.control_block.request_pause(self.number)
        stay_paused = False
        try:
            # Half of the timeout at most: ranks that have joined the pause give up after the whole timeout
            # (``PauseClient``).
            late = self._late(self.number, min(_COME, 0.5 * self.job.timeout))
            if late:
                self._warn(late, asked)
            else:
                super().save(asked)
            stay_paused = asked
        finally:
            if not stay_paused:  # also after an error, else the other ranks would wait for it until their timeout
                self.control_block.request_pause(0)

    def _warn(self, late: list[int], asked: bool) -> None:
        """Log that nothing is saved: once for all scheduled checkpoints, and always if the end is requested."""
        ranks = format_ranks(late)
        if asked:
            logger.warning(
                f"{ranks} did not pause in time: this state is not saved, and training resumes from the checkpoint "
                "before"
            )
        elif not self.warned:
            self.warned = True
            logger.warning(
                f"{ranks} did not pause in time (still in a step or a validation): this checkpoint is skipped"
            )

    def wait_for_exits(self) -> None:
        """Wait until all ranks have seen the exit code, because this rank's host serves the control block to them."""
        self._late(DONE, _GO)

    def _late(self, number: float, seconds: float) -> list[int]:
        """Wait until the other ranks have joined the pause; return the ranks that have not joined in time."""
        end = time.monotonic() + seconds
        while True:
            late = [rank for rank in range(1, self.job.workers) if self.control_block.joined_pause(rank) < number]
            if not late or time.monotonic() > end:
                return late
            time.sleep(_LOOK)


class PauseClient:
    """The part of the other ranks in a pause.

    Args:
        control_block: ControlBlock, or RemoteControlBlock.
        rank: int. This rank.
        timeout: float. Most seconds of a pause.
    """

    def __init__(self, control_block: Any, rank: int, timeout: float) -> None:
        self.control_block, self.rank, self.timeout = control_block, rank, timeout

    def poll(self) -> None:
        """Pause if that is requested.

        Raises:
            CommTimeoutError: the pause does not end within ``timeout`` seconds.
        """
        number, end = self.control_block.requested_pause, time.monotonic() + self.timeout
        if not number:
            return
        # Only here, between two steps: no exchange of this rank is under way.
        self.control_block.join_pause(self.rank, number)
        # An exit code ends the pause too: the caller of this method then ends the process.
        while self.control_block.requested_pause == number and self.control_block.exit_code is None:
            if time.monotonic() > end:
                raise CommTimeoutError(f"rank 0 has been saving the state of the center for {self.timeout:g} s.")
            time.sleep(_LOOK)

    def done(self) -> None:
        """Record that this rank makes no more exchanges, so no pause waits for it."""
        self.control_block.join_pause(self.rank, DONE)
