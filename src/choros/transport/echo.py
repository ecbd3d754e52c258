"""An exception that nobody catches, where it only says that another rank was lost: that one has more to say."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from choros.errors import PeerFailed

CAUSE = 1.0  # seconds in which the rank that failed ends, so that its launcher sees it first
_hooked: list[str] = []
_cries: list[Callable[[], object]] = []


def hook(name: str, where: str, after: Callable[[bool], object]) -> None:
    """Print the loss of another rank in one line, others as before and whose they were; then do something more.

    Args:
        name: str. Of this hook, which is set once.
        where: str. This rank and its host, for people; launchers may not say, or lose it.
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
                _leave_for_torchrun(error)
                if issubclass(kind, Exception):
                    print(
                        f"choros: {where} failed ({kind.__qualname__}), which ends the job with code 1", file=sys.stderr
                    )
        except Exception:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        after(issubclass(kind, PeerFailed))

    sys.excepthook = tell
    _hooked.append(name)


def linger() -> None:
    """Have a rank that only lost another one end a moment later, under ``choros run``, which says the rest itself."""
    if _hooked:
        return
    before = sys.excepthook

    @functools.wraps(before)
    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if issubclass(kind, PeerFailed):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            time.sleep(CAUSE)

    sys.excepthook = tell
    _hooked.append("linger")


def let_the_cause_end_first(where: str) -> None:
    """Have a rank that only lost another one end a moment later than that one.

    Args:
        where: str. This rank and its host, for people.
    """
    hook("cause", where, lambda lost: time.sleep(CAUSE) if lost else [cry() for cry in _cries])


def on_failure(cry: Callable[[], object]) -> None:
    """Have something done when an exception that is this rank's own ends it, after ``let_the_cause_end_first``.

    Args:
        cry: what.
    """
    _cries.append(cry)


def _leave_for_torchrun(error: BaseException) -> None:
    """Leave the traceback where torchrun reads it for the report that it ends with; its report says none otherwise."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or os.path.exists(file):
        return
    text = "".join(traceback.format_exception(error))
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(file, "w", encoding="utf-8") as out:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}, out)
