"""A conversation with a server that may be started again: where its socket breaks, the question is asked once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from choros.comm.tcp.auth_socket import Refused, dial
from choros.comm.tcp.rpc import Head, RpcConnection
from choros.errors import PeerLostError
from choros.types import Array

_TRY, _PAUSE = 1.0, 0.05  # seconds of one try, and until the next


class ReconnectingClient:
    """A client of a ``RpcConnection`` that connects again when the connection breaks.

    A request may be sent twice: the server must carry it out once. The death of the host's first rank is noticed at
    once: it starts the servers of a host, and keeps the port open as long as it lives.

    Args:
        place: str. Of the ``AuthListener``.
        secret: bytes.
        hello: dict. As ``dial`` takes it.
        who: str. Who is there, for people.
        timeout: float. Seconds in which something must move, and in which a server that has gone must be back.
        first: float. Seconds to try for the first time.

    Raises:
        PeerLostError: nobody answers there.

    Example: see ``tests/transport/test_served_centre.py``.
    """

    def __init__(
        self, place: str, secret: bytes, hello: dict[str, Any], who: str, timeout: float, first: float
    ) -> None:
        self._place, self._secret, self._hello, self._who, self._timeout = place, secret, hello, who, timeout
        self._channel = RpcConnection(dial(place, secret, hello, first), who, timeout)
        self._asked: tuple[Head, Sequence[Array]] = {}, ()
        self._closed, self._gone = False, ""

    @property
    def timeout(self) -> float:
        """Seconds in which something must move."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = self._channel.timeout = seconds

    def ask(self, head: Head, arrays: Sequence[Array] = ()) -> tuple[Head, list[Array]]:
        """Return the answer; its arrays are good until the next question.

        Raises:
            ChorosError: that which the other end raised.
            PeerLostError: it has gone, and no other came. CommTimeoutError: it does not answer.
        """
        self.tell(head, arrays)
        return self.hear()

    def tell(self, head: Head, arrays: Sequence[Array] = ()) -> None:
        """Send; the arrays stay as they are until ``hear`` has the answer."""
        self._asked = head, arrays
        if self._gone:
            raise PeerLostError(self._gone)
        try:
            self._channel.tell(head, arrays)
        except PeerLostError:
            if not self._lost():
                raise

    def hear(self) -> tuple[Head, list[Array]]:
        """Take the answer, of another server where this one ends before it came."""
        until: float | None = None
        while True:
            try:
                if self._channel.broken:
                    until = until or time.monotonic() + self._timeout
                    self._channel = self._again(until)
                    self._channel.tell(*self._asked)
                return self._channel.hear()
            except PeerLostError:
                if not self._lost():
                    raise

    def _lost(self) -> bool:
        """Return whether what went wrong is that the connection broke, and that was not wanted."""
        if self._closed or not self._channel.broken:
            return False
        self._channel.close()
        return True

    def _again(self, until: float) -> RpcConnection:
        while True:
            try:
                left = until - time.monotonic()
                end = dial(self._place, self._secret, self._hello, min(_TRY, left))
                return RpcConnection(end, self._who, self._timeout)
            except Refused:
                why = "and so has the rank that would start another one: see what that rank printed last"
            except PeerLostError as error:
                if time.monotonic() < until:
                    time.sleep(_PAUSE)
                    continue
                why = f"and no other one answered for {self._timeout:g} s ({error})"
            self._closed, self._gone = True, f"{self._who} has gone, {why}."
            raise PeerLostError(self._gone)

    def close(self) -> None:
        """End the conversation."""
        self._closed = True
        self._channel.close()
