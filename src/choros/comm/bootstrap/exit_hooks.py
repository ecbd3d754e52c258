"""An exception that nobody catches, where it only says that another rank was lost: that one has more to say."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from choros.errors import PeerLostError

CAUSE = 1.0  # seconds in which the rank that failed ends, so that its launcher sees it first
_hooked: list[str] = []
_cries: list[Callable[[], object]] = []


def code_of(error: BaseException) -> int:
    """Return the code of a process that this ends, of which the system keeps eight bits.

    Example:
        >>> code_of(SystemExit(3)), code_of(SystemExit("no")), code_of(SystemExit()), code_of(SystemExit(-1))
        (3, 1, 0, 255)
        >>> code_of(ValueError()), code_of(KeyboardInterrupt())
        (1, 130)
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def hook(name: str, where: str, after: Callable[[BaseException], object]) -> None:
    """Print the loss of another rank in one line, others as before and whose they were; then do something more.

    Args:
        name: str. Of this hook, which is set once.
        where: str. This rank and its host, for people; launchers may not say, or lose it.
        after: is told what it was.
    """
    if name in _hooked:
        return
    before = sys.excepthook

    @functools.wraps(before)
    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not _only_lost(error):
                before(kind, error, trace)
                _leave_for_torchrun(error)
                if issubclass(kind, Exception):
                    print(f"choros: {where} failed ({kind.__qualname__}), which ends the job", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        after(error)

    sys.excepthook = tell
    _hooked.append(name)


def linger() -> None:
    """Have a rank that only lost another one end a moment later, under ``choros run``, which says the rest itself."""
    if _hooked:
        return
    before = sys.excepthook

    @functools.wraps(before)
    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _only_lost(error):
            before(kind, error, trace)
        else:
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

    def after(error: BaseException) -> None:
        if isinstance(error, PeerLostError):
            time.sleep(CAUSE)
            return
        for cry in _cries:
            cry()

    hook("cause", where, after)


def on_failure(cry: Callable[[], object]) -> None:
    """Have something done when an exception that is this rank's own ends it, after ``let_the_cause_end_first``.

    Args:
        cry: what.
    """
    _cries.append(cry)


def _only_lost(error: BaseException) -> bool:
    """Say the loss of another rank in one line: that one has more to say, and should be seen."""
    if not isinstance(error, PeerLostError):
        return False
    kind = type(error)
    print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
    return True


def _leave_for_torchrun(error: BaseException) -> None:
    """Leave the traceback where torchrun reads it for the report that it ends with; its report says none otherwise."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or os.path.exists(file):
        return
    text = "".join(traceback.format_exception(error))
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(file, "w", encoding="utf-8") as out:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}, out)
