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

_RESEND_SECONDS = 0.05  # until the signal is sent again: by then the callback of the garbage collector has ended


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
        # Raising the exception here would not help: Python ignores it in this hook too.
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            arguments = threading.main_thread().ident, signal.SIGINT
            threading.Timer(_RESEND_SECONDS, signal.pthread_kill, arguments).start()
        else:
            previous(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        # Another hook, installed within the context, stays.
        if sys.unraisablehook is repeat:
            sys.unraisablehook = previous
