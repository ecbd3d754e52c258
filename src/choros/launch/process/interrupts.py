"""Ctrl-C that Python ignores because it arrived in a callback of the garbage collector."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_SECONDS = 0.05  # until the signal is sent again: the callback of the garbage collector has ended then


@contextmanager
def ignored_interrupts_repeated() -> Iterator[None]:
    """Send SIGINT to the main thread again where Python has ignored the KeyboardInterrupt of a first SIGINT.

    The handler of a signal runs wherever the main thread is. JAX has a callback of the garbage collector, and Python
    ignores each exception of such callbacks and of ``__del__``. The user would have to press Ctrl-C again.

    Example:
        >>> import gc, signal, time
        >>> def interrupted(phase, info):
        ...     gc.callbacks.remove(interrupted)
        ...     signal.raise_signal(signal.SIGINT)
        >>> try:
        ...     with ignored_interrupts_repeated():
        ...         gc.callbacks.append(interrupted)
        ...         _ = gc.collect(0)
        ...         time.sleep(5)
        ... except KeyboardInterrupt:
        ...     print("interrupted")
        interrupted
    """
    previous = sys.unraisablehook

    def repeat(unraisable: UnraisableHookArgs) -> None:
        # No exception of this thread here: it would be ignored too.
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        else:
            previous(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        # A hook that somebody else has installed since stays.
        if sys.unraisablehook is repeat:
            sys.unraisablehook = previous
