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
LONGEST = 1800.0  # default limit of a wait for other ranks, in seconds


def stalls() -> tuple[float, float]:
    """Return two limits of a wait for other ranks in seconds: until a warning, and until an error.

    They come from ``HOROVOD_STALL_CHECK_TIME_SECONDS`` (default 60; 0 for no warning) and
    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` (default 0, which means 1,800: every wait has a limit).
    ``HOROVOD_STALL_CHECK_DISABLE`` sets both to 0.

    Raises:
        InvalidInputError: a variable is not a number, or negative.

    Example:
        >>> stalls()
        (60.0, 1800.0)
    """
    warn, end = _seconds(_WARN, 60.0), _seconds(_END, 0.0)
    if _flag(_OFF):
        warn = end = 0.0
    return warn or math.inf, end or LONGEST


def soonest() -> float:
    """Return how many seconds ``init`` waits for all ranks: ``HOROVOD_START_TIMEOUT`` (default 30)."""
    return _seconds(_START, 0.0) or 30.0


def timeline() -> tuple[str, bool] | None:
    """Return the timeline's file and whether to mark steps in it; None if no timeline is requested.

    ``HOROVOD_TIMELINE`` is the file. Its value ``DYNAMIC`` has no effect, as ``hvd.start_timeline`` is always allowed.
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
        raise InvalidInputError(f"{name}={text!r} is not a number of seconds: give 0 or more, or unset it.")
    return seconds
