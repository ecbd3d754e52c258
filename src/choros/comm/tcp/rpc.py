"""Questions and answers over one socket: JSON and arrays, no pickle; one end asks, the other answers."""

from __future__ import annotations

import json
import socket
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from choros import errors
from choros.comm.dtypes import numeric
from choros.errors import ChorosError, CommTimeoutError, PeerLostError, brief
from choros.types import Array, aligned, dtype_of

_LENGTH = struct.Struct("<I")
_LONGEST, _MOST = 1 << 26, 1 << 40  # bytes of a message's head, and of one of its arrays
Head = dict[str, Any]
Answer = Callable[[Head, list[Array]], tuple[Head, Sequence[Array]]]


class RpcConnection:
    """One end of a conversation.

    Args:
        end: a connected socket, which is then this object's.
        who: str. Who is at the other end, for people.
        timeout: float. Seconds in which something must move.

    Attributes:
        broken: bool. Whether the connection has ended; nothing goes over it any more.

    Example:
        >>> import threading
        >>> one, two = (RpcConnection(end, "the test", 5.0) for end in socket.socketpair())
        >>> twice = lambda head, arrays: ({"seen": head["n"]}, [array * 2 for array in arrays])
        >>> threading.Thread(target=two.answer, args=(twice,)).start()
        >>> one.ask({"n": 1}, [np.arange(3.0)])
        ({'seen': 1}, [array([0., 2., 4.])])
        >>> one.close()
    """

    def __init__(self, end: socket.socket, who: str, timeout: float) -> None:
        self._end, self.who, self.broken = end, who, False
        self._rooms: dict[int, Array] = {}
        self._timeout = _limit(timeout)
        end.settimeout(self._timeout)

    @property
    def timeout(self) -> float | None:
        """Seconds in which something must move."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = _limit(seconds)
        self._end.settimeout(self._timeout)

    def ask(self, head: Head, arrays: Sequence[Array] = ()) -> tuple[Head, list[Array]]:
        """Return the answer; its arrays are good until the next question.

        Raises:
            ChorosError: that which the other end raised.
            PeerLostError: it has gone. CommTimeoutError: it does not answer.
        """
        self.tell(head, arrays)
        return self.hear()

    def tell(self, head: Head, arrays: Sequence[Array] = ()) -> None:
        """Send; ``hear`` takes the answer, and other channels may be told meanwhile."""
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        kinds = [[array.dtype.name, array.size] for array in flat]
        text = json.dumps([head, kinds]).encode()
        with _Trouble(self):
            self._end.sendall(_LENGTH.pack(len(text)) + text)
            for array in flat:
                if array.nbytes:
                    self._end.sendall(array.view(np.uint8).data)

    def hear(self) -> tuple[Head, list[Array]]:
        """Take what comes next.

        Raises:
            PeerLostError: the other end has gone, or what it says is no message.
        """
        with _Trouble(self):
            head, kinds = self._head(self._take(self._short(_LENGTH.unpack(self._take(_LENGTH.size))[0])))
            arrays = []
            for number, (kind, count) in enumerate(kinds):
                array = self._room(number, count * kind.itemsize)
                self._fill(array.data)
                arrays.append(array.view(kind))
        if "error" in head:
            named = getattr(errors, str(head["error"]), PeerLostError)
            known = isinstance(named, type) and issubclass(named, ChorosError)
            raise (named if known else PeerLostError)(f"{self.who}: {head.get('text', '')}")
        return head, arrays

    def _short(self, length: int) -> int:
        if length > _LONGEST:
            raise PeerLostError(
                f"{self.who} announced {length} bytes where {_LONGEST} are allowed: it is not of this job."
            )
        return length

    def _head(self, text: bytes) -> tuple[Head, list[tuple[Any, int]]]:
        """Read a message's head: what is said, and of each array its type and its length."""
        try:
            head, kinds = json.loads(text)
            found = [(numeric(dtype_of(name)), _is(count, int)) for name, count in _is(kinds, list)]
            if any(not 0 <= count * kind.itemsize <= _MOST for kind, count in found):
                raise ValueError("too long")
            _is(head, dict)
        except (ValueError, TypeError, RecursionError) as error:
            raise PeerLostError(
                f"{self.who} sent what is no message ({brief(error)}): it is not of this job."
            ) from None
        return head, found

    def answer(self, answer: Answer) -> None:
        """Answer until the other end closes; what ``answer`` raises goes to who asked."""
        self._end.settimeout(None)
        while True:
            try:
                head, arrays = self.hear()
            except (PeerLostError, ValueError):
                self.close()
                return
            try:
                said, back = answer(head, arrays)
            except Exception as error:
                kind = type(error).__name__ if isinstance(error, ChorosError) else "PeerLostError"
                if not isinstance(error, ChorosError):  # a defect here: who asked is sent one line of it
                    traceback.print_exc()
                said, back = {"error": kind, "text": brief(error)}, ()
            try:
                self.tell(said, back)
            except ChorosError:
                self.close()
                return

    def _room(self, number: int, nbytes: int) -> Array:
        """Memory for the n-th array of a message: the same as last time, where it is large enough."""
        room = self._rooms.get(number)
        if room is None or room.size < nbytes:
            try:
                room = self._rooms[number] = aligned(nbytes, np.uint8)
            except MemoryError:
                raise PeerLostError(
                    f"{self.who} announced {nbytes} bytes, for which there is no memory here."
                ) from None
        return room[:nbytes]

    def _take(self, count: int) -> bytes:
        found = bytearray(count)
        self._fill(memoryview(found))
        return bytes(found)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise ConnectionError("it closed the connection")
            view = view[count:]

    def close(self) -> None:
        """End the conversation."""
        self._end.close()


class _Trouble:
    """Says who is at the other end when the socket fails."""

    def __init__(self, channel: RpcConnection) -> None:
        self.channel = channel

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, TimeoutError):
            raise CommTimeoutError(
                f"{self.channel.who} did not answer for {self.channel.timeout} s: see what it is doing, or set a "
                "longer timeout."
            ) from None
        if isinstance(error, OSError) and not isinstance(error, ChorosError):
            self.channel.broken = True
            raise PeerLostError(f"{self.channel.who} has gone ({error}): see what it printed last.") from None


def _is(found: Any, kind: type) -> Any:
    if not isinstance(found, kind):
        raise TypeError(f"a {type(found).__name__} where a {kind.__name__} belongs")
    return found


def _limit(seconds: float) -> float | None:
    """A limit as sockets take it: None for one that nothing reaches."""
    return None if seconds > 1e8 else seconds
