"""Settings from Horovod's environment variables: stall checks and the timeline."""

from __future__ import annotations

import math
import os

from choros.errors import InvalidInputError

_WARN = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_END = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_START = "HOROVOD_START_TIMEOUT"
_OFF = "HOROVOD_STALL_CHECK_DISABLE"
_TIMELINE, _MARK = "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"
NAMES = (_WARN, _END, _OFF, _START, _TIMELINE, _MARK)
LONGEST = 1800.0  # seconds that a rank waits for the others where nothing else is said


def stalls() -> tuple[float, float]:
    """Return after how many seconds a wait is told, and after how many it is given up.

    ``HOROVOD_STALL_CHECK_TIME_SECONDS`` (60; 0 is never), ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` (0, which is
    1,800: no wait is without a limit), and ``HOROVOD_STALL_CHECK_DISABLE``, with which both are as if they were 0.

    Raises:
        InvalidInputError: one of them is no number, or negative.

    Example:
        >>> stalls()
        (60.0, 1800.0)
    """
    warn, end = _seconds(_WARN, 60.0), _seconds(_END, 0.0)
    if _flag(_OFF):
        warn = end = 0.0
    return warn or math.inf, end or LONGEST


def soonest() -> float:
    """Return how many seconds the first meeting waits for all ranks: ``HOROVOD_START_TIMEOUT`` (30)."""
    return _seconds(_START, 0.0) or 30.0


def timeline() -> tuple[str, bool] | None:
    """Return the timeline's file and whether to mark steps in it, or None where none is asked for.

    ``HOROVOD_TIMELINE`` is the file; ``DYNAMIC`` allows ``hvd.start_timeline``, which is always allowed here.
    """
    path = os.environ.get(_TIMELINE, "")
    return None if not path or path.upper() == "DYNAMIC" else (path, _flag(_MARK))


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidInputError(f"{name}={text!r} is no number of seconds: give 0 or more, or unset it.")
    return seconds
