"""Exit hooks: a rank that fails only because a peer failed exits later, so the launcher reports the root cause."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from choros.console import write_line
from choros.errors import PeerLostError

logger = logging.getLogger(__name__)

# Seconds that a secondary failure waits before its exit. The rank that failed first ends meanwhile, so the launcher
# sees that rank's exit code first.
ROOT_CAUSE_SECONDS = 1.0
_installed: list[str] = []
_failure_callbacks: list[Callable[[], object]] = []


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends by this exception; the kernel keeps eight bits.

    Example:
        >>> codes = [exit_code_of(SystemExit(value)) for value in (3, "no", None, -1)]
        >>> codes
        [3, 1, 0, 255]
        >>> exit_code_of(ValueError()), exit_code_of(KeyboardInterrupt())
        (1, 130)
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def install_hook(name: str, where: str, after: Callable[[BaseException], object]) -> None:
    """Install an exception hook that names this rank.

    For a ``PeerLostError`` the hook prints one line. For another exception it calls the previous hook and prints a line
    with this rank and its host, as some launchers do not name the rank. Then it calls ``after``.

    Args:
        name: str. Name of this hook; a second installation under the same name does nothing.
        where: str. This rank and its host, for the line; "" for no line.
        after: called with the exception, after the output.
    """
    if name in _installed:
        return
    previous = sys.excepthook

    @functools.wraps(previous)
    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        try:
            if not _report_lost_peer(error):
                previous(kind, error, tb)
                _write_torchrun_error_file(error)
                if where and issubclass(kind, Exception):
                    logger.error(f"{where} failed ({kind.__qualname__}), which ends the job")
        # The hook must reach ``after`` in every case, even if a previous hook of another package raises.
        except Exception:
            traceback.print_exc()
        # Before ``after``, which may end the process without a flush (MPI_Abort, ``os._exit``).
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        after(error)

    sys.excepthook = report
    _installed.append(name)


def delay_secondary_failure() -> None:
    """Delay the exit of a rank that only lost a peer, under ``choros run``, which reports failures itself."""
    if not _installed:
        install_hook("linger", "", _wait_if_secondary)


def let_root_cause_exit_first(where: str) -> None:
    """Delay the exit of a rank that only lost a peer, and call the callbacks of ``on_failure`` for other exceptions.

    Args:
        where: str. This rank and its host, for messages.
    """

    def on_exception(error: BaseException) -> None:
        _wait_if_secondary(error)
        if not isinstance(error, PeerLostError):
            for callback in _failure_callbacks:
                callback()

    install_hook("cause", where, on_exception)


def on_failure(callback: Callable[[], object]) -> None:
    """Register a callback for an uncaught exception of this rank that is not a ``PeerLostError``.

    It takes effect after ``let_root_cause_exit_first``.
    """
    _failure_callbacks.append(callback)


def _wait_if_secondary(error: BaseException) -> None:
    if isinstance(error, PeerLostError):
        time.sleep(ROOT_CAUSE_SECONDS)


def _report_lost_peer(error: BaseException) -> bool:
    """Print a ``PeerLostError`` in one line and return True; a traceback would hide the output of the failed rank."""
    if not isinstance(error, PeerLostError):
        return False
    kind = type(error)
    write_line(f"{kind.__module__}.{kind.__qualname__}: {error}", sys.stderr)
    return True


def _write_torchrun_error_file(error: BaseException) -> None:
    """Write the traceback to the file that torchrun reads for its final report, if torchrun set one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    # A file that exists was written for an earlier error of this rank, which is nearer to the cause.
    if not path or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(error))
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}, file)
