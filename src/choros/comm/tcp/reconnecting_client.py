"""RPC client of a server that may restart: after a broken connection it connects again and repeats the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from choros.comm.tcp.auth_socket import RefusedError, dial
from choros.comm.tcp.rpc import Header, RpcConnection
from choros.errors import PeerLostError
from choros.types import Array

_CONNECT_SECONDS, _RETRY_SECONDS = 1.0, 0.05  # seconds of one attempt to connect, and until the next attempt


class ReconnectingClient:
    """A client of a ``RpcConnection`` that connects again when the connection breaks.

    A request may be sent twice, so the server must ignore a repeated request. The host's first rank starts the host's
    server, and keeps the port open as long as it lives. So a refused connection means that this rank died, and the
    client raises an error at once.

    Args:
        place: str. ``address:port`` of the ``AuthListener``.
        secret: bytes. The job's secret.
        greeting: see ``dial``.
        peer: str. Name of the server, for messages.
        timeout: float. Seconds that one send or receive may wait, and seconds for a lost server to restart.
        first_timeout: float. Seconds for the first connection.

    Raises:
        PeerLostError: no listener answers.

    Example: see ``tests/transport/test_served_center.py``.
    """

    def __init__(
        self, place: str, secret: bytes, greeting: object, peer: str, timeout: float, first_timeout: float
    ) -> None:
        self._place, self._secret, self._greeting, self._peer, self._timeout = place, secret, greeting, peer, timeout
        self._connection = RpcConnection(dial(place, secret, greeting, first_timeout), peer, timeout)
        self._last_request: tuple[Header, Sequence[Array]] = {}, ()
        self._closed, self._lost_message = False, ""

    @property
    def timeout(self) -> float:
        """Seconds that one send or receive on the socket may wait."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = self._connection.timeout = seconds

    def request(self, header: Header, arrays: Sequence[Array] = ()) -> tuple[Header, list[Array]]:
        """Send a request; return the reply. The reply's arrays are valid until the next request.

        Raises:
            ChorosError: the error of the server.
            PeerLostError: the server ended and did not restart. CommTimeoutError: it did not reply in time.
        """
        self.send(header, arrays)
        return self.receive()

    def send(self, header: Header, arrays: Sequence[Array] = ()) -> None:
        """Send a request. The arrays must not change until ``receive`` returns: they may be sent again."""
        # Before the send: if the send fails halfway, ``receive`` repeats this request.
        self._last_request = header, arrays
        if self._lost_message:
            raise PeerLostError(self._lost_message)
        try:
            self._connection.send(header, arrays)
        except PeerLostError:
            if not self._close_broken():  # else ``receive`` connects again and repeats the request
                raise

    def receive(self, progress: Callable[[], bool] | None = None) -> tuple[Header, list[Array]]:
        """Return the reply; if the server ended before its reply, repeat the request to a restarted server.

        Args:
            progress: see ``RpcConnection.receive``. Defaults to None.
        """
        # One deadline for all attempts of this call: a server that accepts and dies again and again must not be tried
        # for ever.
        deadline: float | None = None
        while True:
            try:
                if self._connection.broken:
                    deadline = deadline or time.monotonic() + self._timeout
                    self._connection = self._reconnect(deadline)
                    # The lost server may have carried the request out. Its counters in shared memory let the new server
                    # detect that.
                    self._connection.send(*self._last_request)
                return self._connection.receive(progress)
            except PeerLostError:
                if not self._close_broken():
                    raise

    def _close_broken(self) -> bool:
        """Close a connection that broke; return False if it did not break, or if this client was closed."""
        if self._closed or not self._connection.broken:
            return False
        self._connection.close()
        return True

    def _reconnect(self, deadline: float) -> RpcConnection:
        while True:
            try:
                remaining = deadline - time.monotonic()
                # Short attempts: while the server restarts, the kernel queues connections at the open port, and nothing
                # answers them.
                sock = dial(self._place, self._secret, self._greeting, min(_CONNECT_SECONDS, remaining))
                return RpcConnection(sock, self._peer, self._timeout)
            # Refused, not silent: the first rank keeps the port open across restarts of its server, so no process
            # will listen again.
            except RefusedError:
                reason = "and so has the rank that would start another one: see the last output of that rank"
            except PeerLostError as error:
                if time.monotonic() < deadline:
                    time.sleep(_RETRY_SECONDS)
                    continue
                reason = f"and no other one answered for {self._timeout:g} s ({error})"
            self._closed, self._lost_message = True, f"{self._peer} has gone, {reason}."
            raise PeerLostError(self._lost_message)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._connection.close()
