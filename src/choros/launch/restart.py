"""Restart of a failed job; the ranks resume from their checkpoint if they wrote one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from choros.console import LAUNCHER
from choros.errors import AGAIN, counted
from choros.launch.process.rank_supervisor import JobResult

logger = logging.getLogger(LAUNCHER)

TURN = "CHOROS_RESTART"  # the variable of the ranks with the number of earlier starts of their job


def run_with_restarts(start: Callable[[dict[str, str]], JobResult], restarts: int) -> JobResult:
    """Start a job, and start it again when it fails.

    A job is not restarted after a signal to this process, or after it ended with the code 75 (state saved).

    Args:
        start: function that starts the job with further environment variables and returns the outcome.
        restarts: int. The largest number of restarts.

    Returns:
        The outcome of the last start.

    Example:
        >>> starts = []
        >>> run_with_restarts(lambda variables: starts.append(variables) or JobResult(len(starts) % 3), 5), starts[-1]
        (JobResult(code=0, signal=0, failed=()), {'CHOROS_RESTART': '2'})
    """
    turn = 0
    while True:
        outcome = start({TURN: str(turn)} if restarts else {})
        if outcome.code in (0, AGAIN) or outcome.signal or turn >= restarts:
            return outcome
        turn += 1
        left = counted(restarts - turn, "restart")
        logger.warning(f"the job ended with code {outcome.code}: started again ({left} left)")
