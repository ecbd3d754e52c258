"""Ranks that meet over sockets end together, under a launcher that leaves the others of a rank that failed alone.

A rank that an exception ends sends one urgent byte to each other rank: it lies beside what they say to each
other, so it is seen by a rank that awaits nothing, and disturbs none that does. A rank that ends otherwise sends none.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from choros.comm.bootstrap.exit_hooks import CAUSE, on_failure
from choros.comm.tcp.connections import ConnectionMesh

_LOOK = 1000.0  # milliseconds after which it is seen that the sockets were closed


def end_together(links: ConnectionMesh, where: str, end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Tell the other ranks when this one fails, and end this one when it is told so and does not notice it itself.

    Args:
        links: ConnectionMesh. The job's.
        where: str. This rank and its host, for people.
        end: what ends this process.

    Example: see ``tests/transport/test_tcp.py``.
    """
    on_failure(lambda: _cry(links))
    threading.Thread(target=_watch, args=(links, where, end), name="choros-alarm", daemon=True).start()


def _cry(links: ConnectionMesh) -> None:
    for line in links.lines.values():
        with suppress(OSError):
            line.end.send(b"!", socket.MSG_OOB)


def _watch(links: ConnectionMesh, where: str, end: Callable[[], object]) -> None:
    poll, lines = select.poll(), {line.end.fileno(): line for line in links.lines.values()}
    for number in lines:
        if number >= 0:
            poll.register(number, select.POLLPRI)
    while lines:
        for number, what in poll.poll(_LOOK):
            line = lines[number]
            if what & select.POLLPRI and line.end.fileno() == number:
                time.sleep(3 * CAUSE)  # a rank that waits for that one says so itself
                print(f"choros: {where} ends, as {line.who} has failed: see what it printed", file=sys.stderr)
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                end()
                return
            poll.unregister(number)  # it has gone, or all sockets were closed
            del lines[number]
        if any(line.end.fileno() < 0 for line in lines.values()):
            return
