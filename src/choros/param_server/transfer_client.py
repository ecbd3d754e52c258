"""A worker's connection to a shard whose vectors are sent by messages; see ``choros.param_server.transfer_slots``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from choros.comm.messages import decode, encode, header_of
from choros.comm.p2p.interface import PointToPoint, RequestHandle, pieces
from choros.comm.tcp.reconnecting_client import ReconnectingClient
from choros.errors import ChorosError, CommTimeoutError, PeerLostError
from choros.param_server.messages import VECTOR_REQUESTS, Fetch, Transfer, TransferReply
from choros.param_server.transfer_slots import PULL, PUSH, keep_unfinished
from choros.types import Array, aligned

logger = logging.getLogger(__name__)

_SLEEP_SECONDS = 5e-5  # between two polls of a message that the other end has finished
_GRACE_SECONDS = 1.0  # seconds that a message may still need after an error


class TransferClient:
    """A ``ShardConnection`` that sends and receives the shard's vectors by messages, and all else by a client.

    After an error that leaves a message unfinished it uses only the client: no other message may use that memory.

    Args:
        client: ReconnectingClient. The client of the shard's server.
        messages: PointToPoint. Messages among all ranks.
        rank: int. The first rank of the shard's host.
        host: str. Name of that host.
        size: int. Length of the shard.
        dtype: dtype of the shard.

    Example: see ``tests/transport/test_served_center.py``.
    """

    def __init__(
        self, client: ReconnectingClient, messages: PointToPoint, rank: int, host: str, size: int, dtype: DTypeLike
    ) -> None:
        self._client, self._messages, self._rank = client, messages, rank
        self._peer = f"rank {rank} on {host}"
        self._shown = aligned(size, dtype)
        self._pushes = self._pulls = 0
        self._requests: list[RequestHandle] = []
        self._memory: object = None
        self._usable, self._is_transfer = True, False

    @property
    def timeout(self) -> float:
        """Seconds that one send or receive on the socket may wait."""
        return self._client.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._client.timeout = seconds

    def request(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> tuple[dict[str, Any], list[Array]]:
        """Send a request; return the reply. See ``ReconnectingClient.request``."""
        self.send(header, arrays)
        return self.receive()

    def send(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Send a request. The arrays must not change until ``receive`` returns."""
        fits_slot = not arrays or arrays[0].nbytes == self._shown.nbytes
        self._is_transfer = self._usable and VECTOR_REQUESTS.has(header) and fits_slot
        if not self._is_transfer:
            self._client.send(header, arrays)
            return
        # Counted before the request: if the connection breaks, the repeated request has the same number and starts no
        # second transfer.
        self._pushes += bool(arrays)
        with self._checked():
            self._client.send(*encode(Transfer(self._pushes if arrays else None, header, list(arrays[1:]))))
            if arrays:
                # After the request: the server posts its receive on the request, so a large message finds it waiting.
                self._start(self._messages.send, np.ascontiguousarray(arrays[0]).reshape(-1), PUSH)

    def receive(self) -> tuple[dict[str, Any], list[Array]]:
        """Return the reply; its arrays are valid until the next request. See ``ReconnectingClient.receive``."""
        if not self._is_transfer:
            return self._client.receive()
        with self._checked():
            # The wait for the reply polls the message too: a library without hardware support moves data only inside
            # calls.
            envelope = decode(TransferReply, *self._client.receive(self._is_done))
            self._finish()
            if envelope.source is None:
                return envelope.reply, envelope.arrays
            self._pulls += 1
            self._start(self._messages.receive, self._shown, PULL)
            # The reply to ``Fetch`` has no arrays, so those of this reply stay valid.
            self._client.send(header_of(Fetch(self._pulls, envelope.source)))
            self._client.receive(self._is_done)
            self._finish()
        return envelope.reply, [self._shown, *envelope.arrays]

    def _start(self, start: Callable[[Array, int, int], RequestHandle], vector: Array, tag: int) -> None:
        self._memory = vector
        self._requests = [start(piece, self._rank, tag) for piece in pieces(vector)]

    def _is_done(self) -> bool:
        return self._messages.done(self._requests)

    def _finish(self, seconds: float | None = None) -> None:
        """Wait until this end of a message is done, which the other end has finished."""
        seconds = self.timeout if seconds is None else seconds
        begun = time.monotonic()
        while not self._is_done():
            if time.monotonic() - begun > seconds:
                raise CommTimeoutError(
                    f"{self._peer}: a vector of the center was not sent or received within {seconds:g} s: look at that "
                    "process, or set a longer timeout.",
                    (self._rank,),
                )
            self._messages.sleep(_SLEEP_SECONDS)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Turn the library's errors into those of Choros; after any error, use messages no more if one did not end."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, self._messages.errors) and not isinstance(error, ChorosError):
                self._give_up()
                raise PeerLostError(f"{self._peer}: {self._messages.name} failed: {error}") from error
            try:
                self._finish(_GRACE_SECONDS)
            except Exception:  # the time limit, or an error of the library
                self._give_up()
            raise

    def _give_up(self) -> None:
        self._usable = False
        keep_unfinished(self._requests, self._memory)
        logger.warning(f"{self._peer}: a message did not end. This rank sends its vectors by TCP from now on.")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
