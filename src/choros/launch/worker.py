"""A worker process: ``python -m choros.launch.worker FD RANK SIZE``, started by ``choros.launch.local.Pool``.

It says hello, then serves ``{"call": "package.module:function", ...}``: imports the function and calls
``function(link, message, blobs, fds)``, which sends its own events through ``link``. What it raises is sent as
``{"event": "failed", ...}`` and the worker serves on. It ends at ``{"call": "exit"}``, or when the caller has gone.
"""

from choros.launch.start import settle

if __name__ == "__main__":
    settle()  # before any other import: cores come first

import contextlib
import importlib
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from choros.errors import BadInput, ChorosError, PeerFailed
from choros.launch.frame import Frame, Message
from choros.launch.link import Dismissed, Link
from choros.launch.peak import peak_memory
from choros.launch.wire import Wire

_MOST_TEXT = 1 << 17


def serve(link: Link) -> None:
    """Answer calls until the caller asks to end, or has gone.

    Args:
        link: the connection.
    """
    while True:
        try:
            frame = link.receive(None)
        except PeerFailed:
            return
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
        BadInput: the name is not of that form, or the module has no such function.

    Example:
        >>> find("os.path:join")("a", "b")
        'a/b'
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise BadInput(f"a call is named package.module:function, got {name!r}")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise BadInput(f"the module {module} has no function {function}")
    return found  # type: ignore[no-any-return]


def _call(link: Link, frame: Frame) -> Message | None:
    """Run one call; the event that tells of its failure, or None."""
    message, blobs, fds = frame
    try:
        find(str(message.get("call")))(link, message, blobs, fds)
    except Dismissed:
        raise
    except BaseException as error:
        return _failed(error)
    return None


def _failed(error: BaseException) -> Message:
    """The event that tells of an exception, small enough to be made when memory is short."""
    peak = peak_memory()
    name = type(error).__qualname__
    try:
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        text = str(error)[-_MOST_TEXT:]
        lines = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
    except BaseException as second:  # a broken __str__, or no memory even for this
        text, lines = "", f"{name} (its text could not be made: {type(second).__name__})"
    traceback.clear_frames(error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    event: Message = {"event": "failed", "type": name, "message": text, "traceback": lines}
    event |= {"host": platform.node(), "peak_memory": peak}
    missing = getattr(error, "missing", None)
    if isinstance(missing, tuple) and all(isinstance(rank, int) for rank in missing):
        event["missing"] = list(missing)
    return event


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
    wire = Wire(socket.socket(fileno=fd), "the caller")
    link = Link(wire, rank, size)
    try:
        link.send({"event": "hello", "rank": rank, "pid": os.getpid()})
        serve(link)
    except PeerFailed:
        return 0
    finally:
        wire.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
