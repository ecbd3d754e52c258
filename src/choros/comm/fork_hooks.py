"""Close a rank's sockets in the child processes that it forks."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """Register a socket that forked child processes must close; return the socket.

    A peer notices the end of this process when the last copy of the socket is closed. Multiprocessing and data loaders
    fork children. A child may outlive a rank that was killed, and an open copy in the child would hide the death.

    Args:
        sock: socket. Used by this process only.

    Example:
        >>> local, remote = socket.socketpair()
        >>> close_in_children(local) is local
        True
        >>> local.close(), remote.close()
        (None, None)
    """
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    # ``list`` first: a garbage collection during the loop would change the set's size and raise.
    for sock in list(_sockets):
        with suppress(OSError):
            # Not ``sock.close``: it keeps the descriptor open as long as a file object made of the socket is open.
            os.close(sock.detach())


os.register_at_fork(after_in_child=_close_in_child)
