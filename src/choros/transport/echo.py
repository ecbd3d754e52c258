"""An exception that nobody catches, where it only says that another rank was lost: that one has more to say."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from choros.errors import PeerFailed

CAUSE = 1.0  # seconds in which the rank that failed ends, so that its launcher sees it first
_hooked: list[str] = []


def hook(name: str, after: Callable[[bool], object]) -> None:
    """Print the loss of another rank in one line, other exceptions as before; then do something more.

    Args:
        name: str. Of this hook, which is set once.
        after: is told whether it was the loss of another rank.
    """
    if name in _hooked:
        return
    before = sys.excepthook

    @functools.wraps(before)
    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if issubclass(kind, PeerFailed):  # the rank that failed has more to say, and should be seen
                print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
            else:
                before(kind, error, trace)
        except Exception:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        after(issubclass(kind, PeerFailed))

    sys.excepthook = tell
    _hooked.append(name)


def let_the_cause_end_first() -> None:
    """Have a rank that only lost another one end a moment later than that one."""
    hook("cause", lambda lost: time.sleep(CAUSE) if lost else None)
