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

_POLL_SECONDS = 0.01  # between two polls
_PAUSE_SECONDS = 60.0  # to wait until all ranks pause; each first ends its step or validation
_EXIT_SECONDS = 5.0  # to wait until all ranks have seen the exit code


class ShardedCheckpointer(AsyncCheckpointer):
    """Checkpoints by rank 0. If other ranks do not pause in time, nothing is saved, and a warning names these ranks."""

    number, warned = 0, False  # the number of the latest pause; whether a skipped checkpoint was reported

    def save(self, end_requested: bool = False) -> None:
        """Save the current state. If ``end_requested``, the ranks stay paused until they end."""
        if self.checkpoints.checkpoint is None:
            return
        self.number += 1
        self.control_block.request_pause(self.number)
        stay_paused = False
        try:
            # Half of the timeout at most: ranks that have joined the pause give up after the whole timeout
            # (``PauseClient``).
            missing = self._wait_for_ranks(self.number, min(_PAUSE_SECONDS, 0.5 * self.job.timeout))
            if missing:
                self._warn(missing, end_requested)
            else:
                super().save(end_requested)
            stay_paused = end_requested
        finally:
            if not stay_paused:  # also after an error, else the other ranks would wait for it until their timeout
                self.control_block.request_pause(0)

    def _warn(self, missing: list[int], end_requested: bool) -> None:
        """Log that nothing is saved: always if the end is requested, else only the first time."""
        ranks = format_ranks(missing)
        if end_requested:
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
        self._wait_for_ranks(DONE, _EXIT_SECONDS)

    def _wait_for_ranks(self, number: float, seconds: float) -> list[int]:
        """Wait until the other ranks have joined the pause; return the ranks that have not joined in time."""
        end = time.monotonic() + seconds
        while True:
            missing = [rank for rank in range(1, self.job.workers) if self.control_block.joined_pause(rank) < number]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(_POLL_SECONDS)


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
                raise CommTimeoutError(
                    f"rank 0 has been saving the state of the center for {self.timeout:g} s: see its output, or give "
                    "the Trainer a larger timeout."
                )
            time.sleep(_POLL_SECONDS)

    def done(self) -> None:
        """Record that this rank makes no more exchanges, so no pause waits for it."""
        self.control_block.join_pause(self.rank, DONE)
