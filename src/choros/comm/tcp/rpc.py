"""Remote procedure calls over one socket: JSON and arrays, no pickle. One end sends requests, the other serves them."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from choros import errors
from choros.comm.dtypes import numeric
from choros.comm.tcp.auth_socket import dial
from choros.errors import ChorosError, CommTimeoutError, PeerLostError, brief
from choros.types import Array, aligned, dtype_of

_LENGTH = struct.Struct("<I")
# Limits on a message: a peer with wrong or hostile data must not make this process allocate any amount of memory.
_MAX_HEADER_BYTES, _MAX_ARRAY_BYTES = 1 << 26, 1 << 40
_BUSY_SECONDS = 0.2  # seconds for which messages of another library are polled without a sleep
Header = dict[str, Any]
_T = TypeVar("_T")
Handler = Callable[[Header, list[Array]], tuple[Header, Sequence[Array]]]


@dataclass(frozen=True)
class RpcAddress:
    """The address of a server, as a message for the processes that will connect to it.

    Attributes:
        place: str. ``address:port`` of the ``AuthListener``.
        secret: str. The job's secret in hex.
        timeout: float. Seconds that one send or receive may wait.
    """

    place: str
    secret: str
    timeout: float

    def dial(self, greeting: object, peer: str, seconds: float) -> RpcConnection:
        """Return a connection to the server.

        Args:
            greeting: message that describes this process; see ``dial``.
            peer: str. Name of the server, for messages.
            seconds: float. Seconds to try.

        Raises:
            PeerLostError: no listener answers, or it rejects this process.
        """
        return RpcConnection(dial(self.place, bytes.fromhex(self.secret), greeting, seconds), peer, self.timeout)


class RpcConnection:
    """One end of an RPC connection.

    Args:
        sock: a connected socket, which this object then owns.
        peer: str. Name of the other end, for messages.
        timeout: float. Seconds that one send or receive on the socket may wait.

    Attributes:
        broken: bool. Whether the connection has failed, or a reply came too late; no message can pass any more.

    Example:
        >>> import threading
        >>> client, server = (RpcConnection(sock, "the test", 5.0) for sock in socket.socketpair())
        >>> double = lambda header, arrays: ({"seen": header["n"]}, [array * 2 for array in arrays])
        >>> threading.Thread(target=server.serve, args=(double,)).start()
        >>> client.request({"n": 1}, [np.arange(3.0)])
        ({'seen': 1}, [array([0., 2., 4.])])
        >>> client.close()
    """

    def __init__(self, sock: socket.socket, peer: str, timeout: float) -> None:
        self._sock, self.peer, self.broken = sock, peer, False
        self._buffers: dict[int, Array] = {}
        self._timeout = _socket_timeout(timeout)
        sock.settimeout(self._timeout)

    @property
    def timeout(self) -> float | None:
        """Seconds that one send or receive on the socket may wait; None for no limit."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = _socket_timeout(seconds)
        self._sock.settimeout(self._timeout)

    def request(self, header: Header, arrays: Sequence[Array] = ()) -> tuple[Header, list[Array]]:
        """Send a request; return the reply. The reply's arrays are valid until the next request.

        Args:
            header: dict of plain JSON.
            arrays: numeric arrays; they are sent flat. Defaults to none.

        Raises:
            ChorosError: the error of the other end.
            PeerLostError: the connection ended. CommTimeoutError: the other end did not reply in time.
        """
        self.send(header, arrays)
        return self.receive()

    def send(self, header: Header, arrays: Sequence[Array] = ()) -> None:
        """Send a request; ``receive`` returns the reply. Requests on other connections may be sent in between."""
        if self.broken:
            raise PeerLostError(f"The connection with {self.peer} has failed before: see the first error.")
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        array_specs = [[array.dtype.name, array.size] for array in flat]
        data = json.dumps([header, array_specs]).encode()
        with _NamedErrors(self):
            # One call for length and header: with TCP_NODELAY each call may become a packet.
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
            for array in flat:
                if array.nbytes:
                    self._sock.sendall(array.view(np.uint8).data)

    def receive(self, progress: Callable[[], bool] | None = None) -> tuple[Header, list[Array]]:
        """Return the next message: its header and its arrays, which are valid until the next message.

        Args:
            progress: called again and again until it returns True or the message begins to arrive. It moves the
                messages of another library on which this message depends. Defaults to None.

        Raises:
            ChorosError: the message is an error of the other end.
            PeerLostError: the connection ended, or the data are not a message.
        """
        with _NamedErrors(self):
            if progress is not None:
                self._poll(progress)
            header, array_specs = self._parse_header(
                self._read_exactly(self._check_header_length(_LENGTH.unpack(self._read_exactly(_LENGTH.size))[0]))
            )
            arrays = []
            for index, (dtype, count) in enumerate(array_specs):
                array = self._buffer(index, count * dtype.itemsize)
                self._read_into(array.data)
                arrays.append(array.view(dtype))
        if "error" in header:
            # The name comes from the wire, so only classes of ``choros.errors`` that are errors of Choros may be
            # raised.
            error_type = getattr(errors, str(header["error"]), PeerLostError)
            is_choros_error = isinstance(error_type, type) and issubclass(error_type, ChorosError)
            raise (error_type if is_choros_error else PeerLostError)(f"{self.peer}: {header.get('text', '')}")
        return header, arrays

    def _poll(self, progress: Callable[[], bool]) -> None:
        """Call ``progress`` until it returns True, the socket is readable, or the time limit has passed."""
        poller, begun, waited = select.poll(), time.monotonic(), 0.0
        poller.register(self._sock, select.POLLIN)
        while not progress() and not poller.poll(0 if waited < _BUSY_SECONDS else 1):
            # The other library's progress may need this core: its messages move only inside calls of the ranks.
            os.sched_yield()
            waited = time.monotonic() - begun
            if self._timeout is not None and waited > self._timeout:
                raise TimeoutError

    def _check_header_length(self, length: int) -> int:
        if length > _MAX_HEADER_BYTES:
            raise PeerLostError(
                f"{self.peer} announced {length} bytes, but {_MAX_HEADER_BYTES} are allowed: it does not belong to "
                "this job."
            )
        return length

    def _parse_header(self, data: bytes) -> tuple[Header, list[tuple[Any, int]]]:
        """Return the header of a message, and the dtype and the length of each array."""
        try:
            header, array_specs = json.loads(data)
            checked = [
                (numeric(dtype_of(name)), _require_type(count, int)) for name, count in _require_type(array_specs, list)
            ]
            # Before any allocation: the sizes come from the wire, and ``count`` may be negative or huge.
            if any(not 0 <= count * dtype.itemsize <= _MAX_ARRAY_BYTES for dtype, count in checked):
                raise ValueError("too long")
            _require_type(header, dict)
        except (ValueError, TypeError, RecursionError) as error:
            raise PeerLostError(
                f"{self.peer} sent data that are not a message ({brief(error)}): it does not belong to this job."
            ) from None
        return header, checked

    def serve(self, handler: Handler) -> None:
        """Serve requests until the other end closes the connection. An exception of ``handler`` goes to the client."""
        # A client may compute for hours between two requests. Its death closes the connection, and keepalive notices a
        # lost host.
        self._sock.settimeout(None)
        while True:
            try:
                header, arrays = self.receive()
            except (PeerLostError, ValueError):
                self.close()
                return
            try:
                reply, reply_arrays = handler(header, arrays)
            # The server survives every error of a handler: other workers use the same shard.
            except Exception as error:
                error_type = type(error).__name__ if isinstance(error, ChorosError) else "PeerLostError"
                if not isinstance(error, ChorosError):  # a defect of the server: the client gets one line of it
                    traceback.print_exc()
                reply, reply_arrays = {"error": error_type, "text": brief(error)}, ()
            try:
                self.send(reply, reply_arrays)
            except ChorosError:
                self.close()
                return

    def _buffer(self, index: int, nbytes: int) -> Array:
        """Return memory for the n-th array of a message; the last message's, if it is large enough."""
        # Kept between messages: new memory for each vector would cost a page fault for every 4 KiB that arrives.
        buffer = self._buffers.get(index)
        if buffer is None or buffer.size < nbytes:
            try:
                buffer = self._buffers[index] = aligned(nbytes, np.uint8)
            except MemoryError:
                raise PeerLostError(f"{self.peer} announced {nbytes} bytes, for which there is no memory.") from None
        return buffer[:nbytes]

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionError("it closed the connection")
            view = view[count:]

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class _NamedErrors:
    """Context manager that turns socket errors into errors of Choros, with the name of the other end."""

    def __init__(self, connection: RpcConnection) -> None:
        self.connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TimeoutError):
            self.connection.broken = True  # a late reply would be taken for the reply to the next request
            raise CommTimeoutError(
                f"{self.connection.peer} did not answer for {self.connection.timeout} s: look at that process, or set "
                "a longer timeout."
            ) from None
        if isinstance(error, OSError) and not isinstance(error, ChorosError):
            self.connection.broken = True
            raise PeerLostError(f"{self.connection.peer} has gone ({error}): see its last output.") from None


def _require_type(value: object, expected: type[_T]) -> _T:
    if not isinstance(value, expected):
        raise TypeError(f"a {type(value).__name__} instead of a {expected.__name__}")
    return value


def _socket_timeout(seconds: float) -> float | None:
    """Return a time limit as sockets accept it: None for more than three years."""
    return None if seconds > 1e8 else seconds
