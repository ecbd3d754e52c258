"""Questions and answers over one socket: JSON and arrays, no pickle; one end asks, the other answers."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from choros import errors
from choros.errors import ChorosError, MeetingTimeout, PeerFailed, brief
from choros.transport.values import numeric
from choros.types import Array, aligned

_LENGTH = struct.Struct("<I")
Head = dict[str, Any]
Answer = Callable[[Head, list[Array]], tuple[Head, Sequence[Array]]]


class Channel:
    """One end of a conversation.

    Args:
        end: a connected socket, which is then this object's.
        who: str. Who is at the other end, for people.
        timeout: float. Seconds in which something must move.

    Example:
        >>> import threading
        >>> one, two = (Channel(end, "the test", 5.0) for end in socket.socketpair())
        >>> twice = lambda head, arrays: ({"seen": head["n"]}, [array * 2 for array in arrays])
        >>> threading.Thread(target=two.answer, args=(twice,)).start()
        >>> one.ask({"n": 1}, [np.arange(3.0)])
        ({'seen': 1}, [array([0., 2., 4.])])
        >>> one.close()
    """

    def __init__(self, end: socket.socket, who: str, timeout: float) -> None:
        self._end, self.who = end, who
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
            PeerFailed: it has gone. MeetingTimeout: it does not answer.
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
        """Take what comes next."""
        with _Trouble(self):
            length = _LENGTH.unpack(self._take(_LENGTH.size))[0]
            head, kinds = json.loads(self._take(length))
            arrays = []
            for number, (name, count) in enumerate(kinds):
                kind = numeric(name)
                array = self._room(number, count * kind.itemsize)
                self._fill(array.data)
                arrays.append(array.view(kind))
        if "error" in head:
            named = getattr(errors, str(head["error"]), PeerFailed)
            known = isinstance(named, type) and issubclass(named, ChorosError)
            raise (named if known else PeerFailed)(f"{self.who}: {head['text']}")
        return head, arrays

    def answer(self, answer: Answer) -> None:
        """Answer until the other end closes; what ``answer`` raises goes to who asked."""
        self._end.settimeout(None)
        while True:
            try:
                head, arrays = self.hear()
            except (PeerFailed, ValueError):
                self.close()
                return
            try:
                said, back = answer(head, arrays)
            except Exception as error:
                kind = type(error).__name__ if isinstance(error, ChorosError) else "PeerFailed"
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
            room = self._rooms[number] = aligned(nbytes, np.uint8)
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

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, TimeoutError):
            raise MeetingTimeout(
                f"{self.channel.who} did not answer for {self.channel.timeout} s: see what it is doing, or set a "
                "longer timeout."
            ) from None
        if isinstance(error, OSError) and not isinstance(error, ChorosError):
            raise PeerFailed(f"{self.channel.who} has gone ({error}): see what it printed last.") from None


def _limit(seconds: float) -> float | None:
    """A limit as sockets take it: None for one that nothing reaches."""
    return None if seconds > 1e8 else seconds
