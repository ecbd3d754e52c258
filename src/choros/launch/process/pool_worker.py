"""A worker process: ``python -m choros.launch.process.pool_worker FD RANK SIZE``.

``choros.launch.process.worker_pool.Pool`` starts it. It says hello, then serves ``{"call": "package.module:function",
...}``: imports the function and calls ``function(link, message, blobs, fds)``, which sends its own events through
``link``. What it raises is sent as ``{"event": "failed", ...}`` and the worker serves on. It ends at ``{"call":
"exit"}``, or when the caller has gone.
"""

from choros.launch.process.exec_stub import settle

if __name__ == "__main__":
    settle()  # before any other import: cores come first

import atexit
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from choros.errors import ChorosError, InvalidInputError, PeerLostError
from choros.launch.process.failure_report import raised
from choros.launch.process.frame import Frame, Message
from choros.launch.process.hidden_packages import lean_keras_import
from choros.launch.process.unix_socket import UnixConnection
from choros.launch.process.worker_connection import ShutdownRequested, WorkerConnection


def serve(link: WorkerConnection) -> None:
    """Answer calls until the caller asks to end, or has gone.

    Args:
        link: the connection.
    """
    while True:
        try:
            frame = link.receive(None)
        except PeerLostError:
            return
        if "call" not in frame[0]:  # said to a call that has failed meanwhile
            continue
        event = _call(link, frame)
        del frame
        if event is not None:
            try:
                link.send(event)
            except ChorosError:
                return


def find(name: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``.

    Args:
        name: the function's module and its name there.

    Returns:
        The function.

    Raises:
        InvalidInputError: the name is not of that form, or the module has no such function.

    Example:
        >>> find("os.path:join")("a", "b")
        'a/b'
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidInputError(f"a call is named package.module:function, got {name!r}")
    with lean_keras_import():
        found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise InvalidInputError(f"the module {module} has no function {function}")
    return found  # type: ignore[no-any-return]


def _call(link: WorkerConnection, frame: Frame) -> Message | None:
    """Run one call; the event that tells of its failure, or None."""
    message, blobs, fds = frame
    try:
        find(str(message.get("call")))(link, message, blobs, fds)
    except ShutdownRequested:
        raise
    except BaseException as error:
        return raised(error)
    return None


def main(argv: list[str]) -> int:
    """Serve on the inherited socket.

    Args:
        argv: its descriptor, this worker's rank, the number of workers.

    Returns:
        The exit code.
    """
    fd, rank, size = (int(each) for each in argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to judge
    os.set_inheritable(fd, False)
    wire = UnixConnection(socket.socket(fileno=fd), "the caller")
    link = WorkerConnection(wire, rank, size)
    try:
        link.send({"event": "hello", "rank": rank, "pid": os.getpid()})
        serve(link)
    except (PeerLostError, ShutdownRequested):
        return 0
    finally:
        wire.close()
    return 0


def leave(code: int) -> None:
    """End this process at once: its frameworks' own way out takes up to a second, for what the kernel does anyway."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
