"""Mutually authenticated TCP sockets, the only sockets of Choros that have an address.

Both ends prove that they know the job's secret by an HMAC (RFC 2104) over two random nonces, one from each end. So a
recorded handshake cannot be replayed, and the secret never crosses the network. The data after the handshake are not
encrypted: these sockets are for the network inside a cluster.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from choros.comm.fork_hooks import close_in_children
from choros.comm.messages import decode, header_of
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError, brief

logger = logging.getLogger(__name__)

_MAGIC, _NONCE, _PROOF, _MAX_GREETING_BYTES = b"choros 1", 16, 32, 1 << 16
_HANDSHAKE_SECONDS = 10.0  # seconds that a handshake may take, so that a silent peer does not hold a thread for ever
_MAX_HANDSHAKES = 256  # handshakes at a time; one more ends the oldest one, so strangers cannot use up the threads
_REPORT_SECONDS = 10.0  # seconds between two lines about rejected peers
_RETRY_SECONDS = 0.05  # seconds before the next accept, after a lack of descriptors, memory or threads
_TRANSIENT_ERRORS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EINTR,
}
_CONNECT_SECONDS = 5.0  # seconds to try to connect to one port
_BACKLOG = 1024  # connections that the kernel queues: all ranks of a job may connect at the same moment
# A listener with too many handshakes ends the oldest one, which may be a rank's. So a rank whose handshake was cut off
# tries again, but not for ever: a port of another program may close each connection, too.
_MAX_CUT_RETRIES = 5


_Greeting = TypeVar("_Greeting")


@dataclass(frozen=True)
class RankGreeting:
    """A rank connects. ``host``: the name of its host."""

    rank: int
    host: str = field(default_factory=lambda: os.uname().nodename)


class NoListenerError(PeerLostError):
    """No listener of this job answered."""


class RefusedError(NoListenerError):
    """No process listens at the port: it has ended, or it never started."""


class _HandshakeCutError(PeerLostError):
    """The other end closed the connection during the handshake."""


class AuthListener(Generic[_Greeting]):
    """A listening port that accepts authenticated peers.

    It rejects every other peer: after ten seconds, after wrong bytes, or if too many handshakes run at once. A line on
    stderr, at most every ten seconds, reports the number of rejected peers.

    Args:
        address: str. IPv4 address of this host to listen at; "" for all addresses of this host.
        secret: bytes. The job's secret.
        greeting: frozen dataclass. The message by which a peer describes itself; see ``choros.comm.messages``. A peer
            with another greeting is rejected.
        ports: sequence of int. The listener takes the first free one. Defaults to a port that the system chooses.
        listen_fd: int or None. Descriptor of a listening socket made by ``listening_socket``, which this object then
            owns. Defaults to None.

    Attributes:
        address: str. ``address:port``, for ``dial``.
        secret: bytes.

    Raises:
        InvalidInputError: none of the ports can be opened.

    Example:
        >>> with AuthListener("127.0.0.1", b"a secret", RankGreeting) as listener:
        ...     client = dial(listener.address, b"a secret", RankGreeting(1, "n1"), 5.0)
        ...     greeting, server = listener.next_peer(5.0)
        ...     server.sendall(b"good day")
        ...     greeting, client.recv(8)
        (RankGreeting(rank=1, host='n1'), b'good day')
        >>> server.close(), client.close()
        (None, None)
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        greeting: type[_Greeting],
        ports: Sequence[int] = (0,),
        listen_fd: int | None = None,
    ) -> None:
        self.secret, self._greeting = secret, greeting
        self._accepted = queue.Queue[tuple[_Greeting, socket.socket]]()
        bind_error: OSError | str = "no port is given"
        for port in ports:
            try:
                existing = None if listen_fd is None else socket.socket(fileno=listen_fd)
                # ``create_server`` sets SO_REUSEADDR: the port of a job that has just ended is in TIME_WAIT and could
                # not be bound.
                self._socket = existing or socket.create_server((address, port), backlog=_BACKLOG)
                break
            except OSError as error:
                bind_error = error
        else:
            raise InvalidInputError(
                f"No port of {list(ports)} can be opened at {address}, which must be this host's: {bind_error}"
            )
        close_in_children(self._socket)
        self.address = f"{address}:{self._socket.getsockname()[1]}"
        self._closed = False
        self._handshakes, self._lock = dict[socket.socket, str](), threading.Lock()
        self._rejected, self._last_rejected_host, self._last_report = 0, "", 0.0
        self._last_shortage_report = -_REPORT_SECONDS  # time of the last line about missing descriptors or threads
        # Its own thread: ranks connect while the main thread imports a framework, and the kernel's queue alone proves
        # nothing to them.
        threading.Thread(target=self._accept_loop, name="choros-listener", daemon=True).start()

    def next_peer(self, timeout: float) -> tuple[_Greeting, socket.socket]:
        """Return the greeting of the next authenticated peer, and the socket to it.

        Raises:
            CommTimeoutError: no peer connected within ``timeout`` seconds.
        """
        try:
            return self._accepted.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise CommTimeoutError(f"No peer connected to {self.address} within {timeout:.1f} s.") from None

    def _accept_loop(self) -> None:
        while not self._closed:
            try:
                sock, (host, _) = self._socket.accept()
                close_in_children(sock)
            except OSError as error:
                if error.errno not in _TRANSIENT_ERRORS:  # the listener was closed
                    return
                self._wait_for_resources(error)
                continue
            with self._lock:
                # ``shutdown`` and not ``close``: it wakes the thread that reads this socket. After a close that thread
                # could read from another connection that got the same descriptor.
                if len(self._handshakes) >= _MAX_HANDSHAKES:
                    with suppress(OSError):
                        next(iter(self._handshakes)).shutdown(socket.SHUT_RDWR)  # the oldest; its thread then fails
                self._handshakes[sock] = host
            try:
                threading.Thread(
                    target=self._authenticate, args=(sock, host), name="choros-handshake", daemon=True
                ).start()
            except RuntimeError as error:  # no thread is available; the peer tries again
                self._end_handshake(sock)
                sock.close()
                self._wait_for_resources(error)

    def _wait_for_resources(self, error: Exception) -> None:
        """Pause after a lack of descriptors, memory or threads; report it at most every ten seconds."""
        if time.monotonic() - self._last_shortage_report > _REPORT_SECONDS:
            self._last_shortage_report = time.monotonic()
            logger.warning(
                f"no peer can connect to {self.address} for now ({error}); this process tries again. If this "
                "lasts, raise its limit of open files (ulimit -n) or of processes (ulimit -u)."
            )
        # Without a pause the loop would spin: a connection that cannot be accepted stays in the queue.
        time.sleep(_RETRY_SECONDS)

    def _authenticate(self, sock: socket.socket, host: str) -> None:
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        try:
            # Fixed lengths until the proof is checked, and one deadline for all reads: a stranger that sends a byte at
            # a time gets no more time or memory.
            opening = _receive_exactly(sock, len(_MAGIC) + _NONCE, deadline)
            if not opening.startswith(_MAGIC):
                raise PeerLostError("a stranger")
            # A nonce from each end: a recorded proof of one end is worthless, as the other end's nonce differs in every
            # connection.
            own_nonce, client_nonce = secrets.token_bytes(_NONCE), opening[len(_MAGIC) :]
            sock.sendall(own_nonce + _sign(self.secret, b"server", client_nonce + own_nonce))
            proof = _receive_exactly(sock, _PROOF, deadline)
            length = int.from_bytes(_receive_exactly(sock, 4, deadline), "little")
            if length > _MAX_GREETING_BYTES:
                raise PeerLostError("a stranger")
            text = _receive_exactly(sock, length, deadline)
            # The two proofs have different roles, so a peer cannot send the server's proof back as its own.
            # ``compare_digest`` takes the same time for any wrong proof, so its time reveals nothing about the right
            # one.
            if not hmac.compare_digest(proof, _sign(self.secret, b"client", client_nonce + own_nonce + text)):
                raise PeerLostError("a stranger")
            # After the check: no parser reads bytes of a stranger.
            greeting = decode(self._greeting, json.loads(text))
            sock.sendall(b"\1")
            sock.settimeout(None)
        except OSError:
            self._reject(sock, host)
            return
        except (ValueError, RecursionError) as error:  # of the greeting: the peer knows the secret
            logger.warning(
                f"a process on {host} was rejected at {self.address}, as its greeting is not of this version of "
                f"Choros ({brief(error)}): all processes of a job need the same version"
            )
            self._end_handshake(sock)
            with sock, suppress(OSError):
                sock.sendall(b"\0")
            return
        # Before the put: ``_handshakes`` holds connections that the accept loop may end, and this one now belongs to a
        # rank.
        self._end_handshake(sock)
        self._accepted.put((greeting, _set_socket_options(sock)))
        if self._closed:  # ``close`` may have emptied the queue before the put
            self._close_accepted()

    def _end_handshake(self, sock: socket.socket) -> None:
        """Remove a connection from those that the accept loop may end."""
        with self._lock:
            del self._handshakes[sock]

    def _reject(self, sock: socket.socket, host: str) -> None:
        """Close the connection to a peer that failed the handshake; report it at most every ten seconds."""
        now = time.monotonic()
        with self._lock:
            del self._handshakes[sock]
            # ``close`` itself cuts handshakes off; those are not strangers.
            self._rejected += not self._closed
            self._last_rejected_host = host
            if now - self._last_report > _REPORT_SECONDS:
                self._last_report = now
                self._report_rejections()
        sock.close()

    def _report_rejections(self) -> None:
        if self._rejected:
            peers = "1 peer" if self._rejected == 1 else f"{self._rejected} peers"
            verb = "was" if self._rejected == 1 else "were"
            logger.warning(
                f"{peers} that did not know this job's secret {verb} rejected at {self.address}, the last from "
                f"{self._last_rejected_host}"
            )
        self._rejected = 0

    def close(self) -> None:
        """Stop listening, and close the connections that ``next_peer`` has not returned."""
        self._closed = True
        with suppress(OSError):
            # On Linux ``close`` does not wake a thread that is in ``accept``; ``shutdown`` does.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            self._report_rejections()
        self._close_accepted()

    def _close_accepted(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._accepted.get_nowait()[1].close()

    def __enter__(self) -> AuthListener[_Greeting]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(address: str) -> int:
    """Return a port that is free now, for a library that needs a port number.

    Args:
        address: str. Address of this host.

    Example:
        >>> free_port("127.0.0.1") > 1023
        True
    """
    # Another process may take the port before the caller does. Where a library accepts a descriptor,
    # ``listening_socket`` has no such gap.
    with socket.create_server((address, 0)) as sock:
        return int(sock.getsockname()[1])


def listening_socket(address: str) -> tuple[int, int]:
    """Open a listening socket; return its port and its descriptor, which the caller owns.

    Args:
        address: str. Address of this host.

    Example:
        >>> port, fd = listening_socket("127.0.0.1")
        >>> os.close(fd)
    """
    sock = socket.create_server((address, 0), backlog=_BACKLOG)
    return int(sock.getsockname()[1]), sock.detach()


def dial(place: str, secret: bytes, greeting: object, timeout: float) -> socket.socket:
    """Connect to an ``AuthListener``; return the socket.

    Args:
        place: str. ``address:port`` of the listener, or ``address:port,port,...`` if it may have any of these ports.
        secret: bytes. The job's secret.
        greeting: message of the listener's kind, which describes this process. It is sent without encryption.
        timeout: float. Seconds to try.

    Raises:
        PeerLostError: the other end does not know the secret, or rejected this process.
        NoListenerError: no listener answered. RefusedError: the host refused the last attempt, as no process listens.
    """
    host, _, port_list = place.rpartition(":")
    deadline, ports, reason = time.monotonic() + timeout, [int(port) for port in port_list.split(",")], ""
    cut_count, refused, text = 0, False, json.dumps(header_of(greeting)).encode()
    while True:
        for port in ports:
            remaining = deadline - time.monotonic()
            try:
                sock = close_in_children(
                    # At least 0.1 s, so a deadline that has passed still makes one attempt. At most 5 s, as a firewall
                    # that drops packets would use up the whole time at the first port.
                    socket.create_connection((host, port), timeout=min(max(remaining, 0.1), _CONNECT_SECONDS))
                )
                return _handshake(sock, f"{host}:{port}", secret, text)
            except PeerLostError as error:
                cut_count += isinstance(error, _HandshakeCutError)
                # With several ports another program may have one of them, so the next port is tried.
                if len(ports) == 1 and not (isinstance(error, _HandshakeCutError) and cut_count <= _MAX_CUT_RETRIES):
                    raise
                reason, refused = str(error), False
            except OSError as error:
                # The first reason stays: "wrong secret" at one port says more than "connection refused" at the next.
                reason, refused = reason or str(error), isinstance(error, ConnectionRefusedError)
        if time.monotonic() > deadline:
            raise (RefusedError if refused else NoListenerError)(
                f"No listener answers at {place} ({reason}): {_network_hint(host)}"
            )
        # The listener may start later than this process: ranks start in any order.
        time.sleep(0.05)


def _handshake(sock: socket.socket, address: str, secret: bytes, greeting: bytes) -> socket.socket:
    """Run the client's side of the handshake."""
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    try:
        own_nonce = secrets.token_bytes(_NONCE)
        sock.settimeout(_HANDSHAKE_SECONDS)
        sock.sendall(_MAGIC + own_nonce)
        # The listener proves itself first. A client does not send its proof to a process that does not know the secret.
        reply = _receive_exactly(sock, _NONCE + _PROOF, deadline)
        nonces = own_nonce + reply[:_NONCE]
        if not hmac.compare_digest(reply[_NONCE:], _sign(secret, b"server", nonces)):
            raise PeerLostError(
                f"The process at {address} does not know this job's secret: it does not belong to this job."
            )
        sock.sendall(_sign(secret, b"client", nonces + greeting) + len(greeting).to_bytes(4, "little") + greeting)
        if _receive_exactly(sock, 1, deadline) != b"\1":
            raise PeerLostError(
                f"{address} rejected this process: all processes of a job need the same version of Choros."
            )
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        # PeerLostError is an OSError. It means a wrong secret and must not be taken for a cut connection, which is
        # tried again.
        if isinstance(error, PeerLostError):
            raise
        raise _HandshakeCutError(
            f"{address} ended the connection during the handshake ({error}): it may belong to another job."
        ) from None
    return _set_socket_options(sock)


def _network_hint(host: str) -> str:
    return f"check that {os.uname().nodename} can reach {host}, or name another network in CHOROS_NETWORK."


def _sign(secret: bytes, role: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, role + data, "sha256")


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        # Each read gets what is left of the whole handshake. 0 would make the socket non-blocking, hence the lower
        # bound.
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(count - len(received))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        received += piece
    return received


def _set_socket_options(sock: socket.socket) -> socket.socket:
    """Send small frames at once, and notice a lost host within two minutes."""
    # Nagle's algorithm would hold a small frame back until the last one is acknowledged, for up to 40 ms with delayed
    # ACKs.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Keepalive covers an idle connection only. TCP_USER_TIMEOUT covers one with unacknowledged data, for which the
    # kernel otherwise tries for about 15 minutes.
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
