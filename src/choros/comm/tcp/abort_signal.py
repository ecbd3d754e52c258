"""Abort signal over sockets: a failed rank ends the other ranks, under a launcher that would leave them alone.

A rank that ends by an exception sends one urgent byte (TCP out-of-band data) to each other rank. The byte is not part
of the message stream. So a rank that reads no messages still notices it, and it does not disturb a rank that reads. A
rank that ends otherwise sends no byte.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from choros.comm.bootstrap.exit_hooks import ROOT_CAUSE_SECONDS, on_failure
from choros.comm.tcp.connections import ConnectionMesh

logger = logging.getLogger(__name__)

_POLL_MILLISECONDS = 1000.0  # poll does not report a socket that this process closed: look after this time


def end_together(mesh: ConnectionMesh, where: str, terminate: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Signal a failure of this rank to the other ranks, and end this rank after such a signal from another rank.

    Args:
        mesh: ConnectionMesh. The connections of the job.
        where: str. This rank and its host, for messages.
        terminate: ends this process; called after the message was printed. Defaults to ``os._exit(1)``.

    Example: see ``tests/transport/test_tcp.py``.
    """
    on_failure(lambda: _send_abort(mesh))
    # A thread, as the main thread may be inside a framework's call for minutes. A daemon, as it must not delay a normal
    # exit.
    threading.Thread(target=_watch_peers, args=(mesh, where, terminate), name="choros-abort-watch", daemon=True).start()


def _send_abort(mesh: ConnectionMesh) -> None:
    for connection in mesh.connections.values():
        with suppress(OSError):
            # No mesh lock: a thread that hangs in a call may hold it. The socket does not block, so a full buffer is an
            # error here, which is ignored.
            connection.sock.send(b"!", socket.MSG_OOB)


def _watch_peers(mesh: ConnectionMesh, rank_name: str, terminate: Callable[[], object]) -> None:
    poll = select.poll()
    connections = {connection.sock.fileno(): connection for connection in mesh.connections.values()}
    for fd in connections:
        # The descriptor is -1 if the group was closed before this thread started.
        if fd >= 0:
            poll.register(fd, select.POLLPRI)
    while connections:
        for fd, events in poll.poll(_POLL_MILLISECONDS):
            connection = connections[fd]
            # The number may belong to another file by now: after a close the kernel gives it to the next file that is
            # opened.
            if events & select.POLLPRI and connection.sock.fileno() == fd:
                # A rank that waits for the failed rank raises its own error within this time, which says more.
                time.sleep(3 * ROOT_CAUSE_SECONDS)
                logger.warning(f"{rank_name} ends, as {connection.peer} has failed: see the output of that rank")
                # ``os._exit`` runs no atexit handler and flushes nothing. It is used as a main thread inside a
                # framework's call would never act on an exception.
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                terminate()
                return
            poll.unregister(fd)  # the peer closed its socket, or this process closed its own
            del connections[fd]
        # The group was closed by this process: a failure of a peer is no longer this rank's concern.
        if any(connection.sock.fileno() < 0 for connection in connections.values()):
            return
