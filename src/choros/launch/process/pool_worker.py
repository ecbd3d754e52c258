"""A worker process: ``python -m choros.launch.process.pool_worker FD RANK SIZE``.

``choros.launch.process.worker_pool.Pool`` starts it. It sends ``WorkerStarted``, then serves each ``Call``: it imports
the function and calls ``function(link, arguments, blobs, fds)``. The function sends events through ``link``. If it
raises, the worker sends a ``RankFailure`` and continues. The worker ends at an ``ExitRequest``, or when the caller
closes the connection.
"""

from choros.launch.process.exec_stub import settle

if __name__ == "__main__":
    settle()  # before other imports: threads that they start would not be bound

import atexit
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from choros.comm.messages import Messages, decode, header_of
from choros.errors import ChorosError, InvalidInputError, PeerLostError
from choros.launch.process.child_process import set_module_path
from choros.launch.process.failure_report import raised
from choros.launch.process.frame import Frame, Message
from choros.launch.process.hidden_packages import lean_keras_import
from choros.launch.process.unix_socket import UnixConnection
from choros.launch.process.worker_connection import Call, ShutdownRequested, WorkerConnection, WorkerStarted

_CALLS = Messages(Call)


def serve(link: WorkerConnection) -> None:
    """Serve calls until the caller asks this worker to end, or has closed the connection.

    Args:
        link: the connection.
    """
    while True:
        try:
            frame = link.receive(None)
        except PeerLostError:
            return
        if not _CALLS.has(frame[0]):  # a message for a call that has failed since
            continue
        event = _call(link, frame)
        # The blobs may be large, and would stay in memory until the next call.
        del frame
        if event is not None:
            try:
                link.send(event)
            except ChorosError:
                return


def find(name: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``.

    Args:
        name: the module and the name of the function.

    Returns:
        The function.

    Raises:
        InvalidInputError: the name has another form, or the module has no such function.

    Example:
        >>> find("os.path:join")("a", "b")
        'a/b'
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidInputError(f"a call is named package.module:function, got {name!r}")
    with lean_keras_import():
        target = getattr(importlib.import_module(module), function, None)
    if not callable(target):
        raise InvalidInputError(f"the module {module} has no function {function}")
    return target  # type: ignore[no-any-return]


def _call(link: WorkerConnection, frame: Frame) -> Message | None:
    """Run one call; return the report of the exception if it raised, else None."""
    header, blobs, fds = frame
    call = decode(Call, header)
    set_module_path(call.module_path)
    try:
        find(call.function)(link, call.arguments, blobs, fds)
    except ShutdownRequested:
        raise
    # Also a ``SystemExit`` of the user's code: the worker must report it and serve further calls.
    except BaseException as error:
        return header_of(raised(error))
    return None


def main(argv: list[str]) -> int:
    """Serve on the inherited socket.

    Args:
        argv: the socket's descriptor, this worker's rank, the number of workers.

    Returns:
        The exit code.
    """
    fd, rank, size = (int(number) for number in argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    os.set_inheritable(fd, False)
    wire = UnixConnection(socket.socket(fileno=fd), "the caller")
    link = WorkerConnection(wire, rank, size)
    try:
        link.send(header_of(WorkerStarted(rank, os.getpid())))
        serve(link)
    except (PeerLostError, ShutdownRequested):
        return 0
    finally:
        wire.close()
    return 0


def exit_quickly(code: int) -> None:
    """Exit after the atexit functions, without the interpreter's shutdown: with the frameworks it takes up to 1 s."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_quickly(main(sys.argv[1:]))
