"""A job that failed is started again: the ranks go on from their checkpoint, if they wrote one."""

from __future__ import annotations

import sys
from collections.abc import Callable

from choros.errors import AGAIN
from choros.launch.process.rank_supervisor import JobResult

TURN = "CHOROS_RESTART"  # tells ranks how often their job was started before


def again(start: Callable[[dict[str, str]], JobResult], restarts: int) -> JobResult:
    """Start a job, and start it again when it fails; not when this process was sent a signal, or the ranks were.

    Args:
        start: starts it with these variables beside its own; returns what has become of it.
        restarts: int. How often it may be started again.

    Returns:
        What has become of it the last time.

    Example:
        >>> told = []
        >>> again(lambda more: told.append(more) or JobResult(len(told) % 3), 5), told[-1]
        (JobResult(code=0, signal=0, failed=()), {'CHOROS_RESTART': '2'})
    """
    for turn in range(restarts + 1):
        outcome = start({TURN: str(turn)} if restarts else {})
        if outcome.code in (0, AGAIN) or outcome.signal or turn == restarts:
            break
        left = f"{restarts - turn - 1} restarts left"
        print(
            f"choros run: the job ended with code {outcome.code}: started again ({left})", file=sys.stderr, flush=True
        )
    return outcome
