"""Close a rank's sockets in the child processes that it forks."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_children(end: socket.socket) -> socket.socket:
    """Have processes that this one forks close their copy of a socket; return it.

    The other end sees that this process has ended when the last copy is closed. A forked child, as multiprocessing and
    data loaders make them, may live on after a rank that was killed, and would hide its death.

    Args:
        end: socket. Of this process alone.

    Example:
        >>> near, far = socket.socketpair()
        >>> keep_from_children(near) is near
        True
        >>> near.close(), far.close()
        (None, None)
    """
    _sockets.add(end)
    return end


def _close_in_child() -> None:
    for end in list(_sockets):
        with suppress(OSError):
            os.close(end.detach())  # not ``close``, which waits for files made of the socket


os.register_at_fork(after_in_child=_close_in_child)
