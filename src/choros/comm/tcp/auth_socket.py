"""The only sockets of Choros that have an address: who opens one proves to the other end that it knows the secret.

Both ends show an HMAC (RFC 2104) over numbers that both have drawn anew, so nothing that was overheard can be used
again and the secret itself never travels. What follows is not encrypted: these are for the network inside a cluster.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from choros.comm.fork_hooks import keep_from_children
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError

_MAGIC, _NONCE, _PROOF, _MOST = b"choros 1", 16, 32, 1 << 16
_SHAKE = 10.0  # seconds that one who has come may take to prove itself
_AT_ONCE = 256  # who may be about it at a time: the one who came first gives way to one more
_TELL = 10.0  # seconds between two lines about those who were turned away
_PAUSE = 0.05  # seconds before the next try to let somebody in, where descriptors or memory are missing
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EINTR}
_TRY = 5.0  # seconds to try one port for
_BACKLOG = 1024
_AGAIN = 5  # times that who was cut off before it was known tries once more


class NoListenerError(PeerLostError):
    """No one was there who knows the secret."""


class Refused(NoListenerError):
    """Nothing hears there: the process that had the port has ended, or was never there."""


class _CutOff(PeerLostError):
    """The other end closed the connection before either knew the other."""


class AuthListener:
    """A listening port, and the authenticated peers that connected to it.

    All others are turned away after ten seconds, a few bytes, or when too many of them are there at once; one line in
    ten seconds says how many they were.

    Args:
        address: str. The IPv4 address of this host to be reached at; "" for all that it has.
        secret: bytes. Who does not know it is turned away.
        ports: of which the first free one is taken. Defaults to one that the system chooses.
        heard: the descriptor of a socket that hears already, made by ``listener``, which is then taken over.

    Attributes:
        place: str. ``address:port``, for ``dial``.
        secret: bytes.

    Example:
        >>> with AuthListener("127.0.0.1", b"a secret") as door:
        ...     far = dial(door.place, b"a secret", {"rank": 1}, 5.0)
        ...     hello, near = door.next(5.0)
        ...     near.sendall(b"good day")
        ...     hello, far.recv(8)
        ({'rank': 1}, b'good day')
        >>> near.close(), far.close()
        (None, None)
    """

    def __init__(self, address: str, secret: bytes, ports: Sequence[int] = (0,), heard: int | None = None) -> None:
        self.secret, self._came = secret, queue.Queue[tuple[dict[str, Any], socket.socket]]()
        for port in ports:
            try:
                made = None if heard is None else socket.socket(fileno=heard)
                self._socket = made or socket.create_server((address, port), backlog=_BACKLOG)
                break
            except OSError as error:
                wrong = error
        else:
            raise InvalidInputError(
                f"No port of {list(ports)} can be opened at {address}, which must be this host's: {wrong}"
            )
        keep_from_children(self._socket)
        self.place = f"{address}:{self._socket.getsockname()[1]}"
        self._shut = False
        self._proving, self._lock = dict[socket.socket, str](), threading.Lock()
        self._refused, self._last, self._told = 0, "", 0.0
        self._missed = -_TELL  # when it was last said that descriptors or threads are missing
        threading.Thread(target=self._welcome, name="choros-door", daemon=True).start()

    def next(self, timeout: float) -> tuple[dict[str, Any], socket.socket]:
        """Return what the next one who came said of itself, and the socket to it.

        Raises:
            CommTimeoutError: nobody came.
        """
        try:
            return self._came.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise CommTimeoutError(f"Nobody came to {self.place} for {timeout:.1f} s.") from None

    def _welcome(self) -> None:
        while not self._shut:
            try:
                end, (host, _) = self._socket.accept()
                keep_from_children(end)
            except OSError as error:
                if error.errno not in _PASSING:  # closed
                    return
                self._wait(error)
                continue
            with self._lock:
                if len(self._proving) >= _AT_ONCE:
                    with suppress(OSError):
                        next(iter(self._proving)).shutdown(socket.SHUT_RDWR)  # its own thread does the rest
                self._proving[end] = host
            try:
                threading.Thread(target=self._prove, args=(end, host), name="choros-guest", daemon=True).start()
            except RuntimeError as error:  # no more threads for now: who dials tries again
                with self._lock:
                    del self._proving[end]
                end.close()
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        """Wait for what is missing for now, such as descriptors; say so now and then."""
        if time.monotonic() - self._missed > _TELL:
            self._missed = time.monotonic()
            print(
                f"choros: nobody can come in at {self.place} for now ({error}); it is tried again. If this lasts, "
                "raise the limit of open files (ulimit -n) or of processes (ulimit -u) of this process.",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_PAUSE)

    def _prove(self, end: socket.socket, host: str) -> None:
        until = time.monotonic() + _SHAKE
        try:
            theirs = _take(end, len(_MAGIC) + _NONCE, until)
            if not theirs.startswith(_MAGIC):
                raise PeerLostError("a stranger")
            drawn, said = secrets.token_bytes(_NONCE), theirs[len(_MAGIC) :]
            end.sendall(drawn + _sign(self.secret, b"door", said + drawn))
            proof, length = _take(end, _PROOF, until), int.from_bytes(_take(end, 4, until), "little")
            if length > _MOST:
                raise PeerLostError("a stranger")
            hello = _take(end, length, until)
            if not hmac.compare_digest(proof, _sign(self.secret, b"guest", said + drawn + hello)):
                raise PeerLostError("a stranger")
            found = json.loads(hello)
            end.sendall(b"\1")
            end.settimeout(None)
        except (OSError, ValueError, PeerLostError):
            self._turn_out(end, host)
            return
        with self._lock:
            del self._proving[end]
        self._came.put((found, _tuned(end)))
        if self._shut:
            self._turn_away()

    def _turn_out(self, end: socket.socket, host: str) -> None:
        """Close the line to one who did not prove anything, and say so now and then."""
        now = time.monotonic()
        with self._lock:
            del self._proving[end]
            self._refused += not self._shut
            self._last = host
            if now - self._told > _TELL:
                self._told = now
                self._say()
        end.close()

    def _say(self) -> None:
        if self._refused:
            were = "was" if self._refused == 1 else "were"
            print(
                f"choros: {self._refused} who did not know this job's secret {were} turned away at {self.place}, the "
                f"last from {self._last}",
                file=sys.stderr,
                flush=True,
            )
        self._refused = 0

    def close(self) -> None:
        """Let nobody else in; who came and was not taken is turned away."""
        self._shut = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            self._say()
        self._turn_away()

    def _turn_away(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._came.get_nowait()[1].close()

    def __enter__(self) -> AuthListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(address: str) -> int:
    """Return a port that nobody has now, for a library that wants to be told one.

    Args:
        address: str. Of this host.

    Example:
        >>> free_port("127.0.0.1") > 1023
        True
    """
    with socket.create_server((address, 0)) as end:
        return int(end.getsockname()[1])


def listener(address: str) -> tuple[int, int]:
    """Return a port of this host and the descriptor of a socket that hears there, for who takes it over.

    Args:
        address: str. Of this host.

    Example:
        >>> port, fd = listener("127.0.0.1")
        >>> os.close(fd)
    """
    end = socket.create_server((address, 0), backlog=_BACKLOG)
    return int(end.getsockname()[1]), end.detach()


def dial(place: str, secret: bytes, hello: dict[str, Any], timeout: float) -> socket.socket:
    """Return a socket to a ``AuthListener``.

    Args:
        place: str. Its ``address:port``, or ``address:port,port,...`` where it may have taken any of several.
        secret: bytes.
        hello: dict. What to say of oneself: plain JSON, not secret.
        timeout: float. Seconds to try for.

    Raises:
        PeerLostError: who answers there does not know the secret, or does not take this one.
        Nobody: nobody answers. Refused: the last to say so was the host itself, as nothing hears there.
    """
    host, _, last = place.rpartition(":")
    until, ports, why = time.monotonic() + timeout, [int(port) for port in last.split(",")], ""
    cut, none = 0, False
    while True:
        for port in ports:
            left = until - time.monotonic()
            try:
                end = keep_from_children(socket.create_connection((host, port), timeout=min(max(left, 0.1), _TRY)))
                return _known(end, f"{host}:{port}", secret, json.dumps(hello).encode())
            except PeerLostError as error:
                cut += isinstance(error, _CutOff)
                if len(ports) == 1 and not (isinstance(error, _CutOff) and cut <= _AGAIN):
                    raise
                why, none = str(error), False
            except OSError as error:
                why, none = why or str(error), isinstance(error, ConnectionRefusedError)
        if time.monotonic() > until:
            raise (Refused if none else NoListenerError)(f"Nobody answers at {place} ({why}): {_network(host)}")
        time.sleep(0.05)


def _known(end: socket.socket, place: str, secret: bytes, text: bytes) -> socket.socket:
    """Prove to each other that both know the secret."""
    until = time.monotonic() + _SHAKE
    try:
        mine = secrets.token_bytes(_NONCE)
        end.settimeout(_SHAKE)
        end.sendall(_MAGIC + mine)
        theirs = _take(end, _NONCE + _PROOF, until)
        both = mine + theirs[:_NONCE]
        if not hmac.compare_digest(theirs[_NONCE:], _sign(secret, b"door", both)):
            raise PeerLostError(
                f"Who answers at {place} does not know this job's secret: another job's ranks, or a stranger."
            )
        end.sendall(_sign(secret, b"guest", both + text) + len(text).to_bytes(4, "little") + text)
        if _take(end, 1, until) != b"\1":
            raise PeerLostError(f"{place} did not take this rank.")
        end.settimeout(None)
    except OSError as error:
        end.close()
        if isinstance(error, PeerLostError):
            raise
        raise _CutOff(
            f"{place} ended the conversation before it began ({error}): it may belong to another job."
        ) from None
    return _tuned(end)


def _network(host: str) -> str:
    return f"see whether {host} is reached from {os.uname().nodename}, or name another network in CHOROS_NETWORK."


def _sign(secret: bytes, who: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, who + text, "sha256")


def _take(end: socket.socket, count: int, until: float) -> bytes:
    found = b""
    while len(found) < count:
        end.settimeout(max(until - time.monotonic(), 1e-3))
        piece = end.recv(count - len(found))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        found += piece
    return found


def _tuned(end: socket.socket) -> socket.socket:
    """Send small frames at once, and notice a host that has gone within two minutes."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end
