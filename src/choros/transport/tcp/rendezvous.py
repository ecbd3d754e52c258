"""How ranks that share nothing but an address and a secret learn of each other: each brings bytes, all get all."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from choros.errors import ChorosError, MeetingTimeout
from choros.transport.board import names
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import Door, dial

_PORTS = 8


class Rendezvous:
    """The place of the meeting: collects what each rank brings and gives all to all, once.

    Args:
        door: Door. Where they come.
        size: int. How many. As soon as one is there, the others have the time that it is ready to wait.

    Example:
        >>> with Door("127.0.0.1", b"secret") as door:
        ...     meeting = Rendezvous(door, 1)
        ...     come(door.place, b"secret", 0, 5.0)(b"here")
        [b'here']
    """

    def __init__(self, door: Door, size: int) -> None:
        self._door, self._size = door, size
        threading.Thread(target=self._collect, name="choros-rendezvous", daemon=True).start()

    def _collect(self) -> None:
        guests, brought, error = list[Channel](), dict[int, bytes](), ""
        limit, until = 0.0, time.monotonic() + threading.TIMEOUT_MAX
        while len(brought) < self._size and not error:
            try:
                hello, end = self._door.next(until - time.monotonic())
            except MeetingTimeout:
                missing = sorted(set(range(self._size)) - set(brought))
                error = (
                    f"{names(missing)} of {self._size} did not come to {self._door.place} within "
                    f"{limit:g} s: see whether they were started, and whether they reach this host."
                )
                break
            if not guests:
                limit = float(hello["timeout"])
                until = time.monotonic() + limit
            guests.append(Channel(end, f"rank {hello['rank']}", 30.0))
            try:
                brought[int(hello["rank"])] = guests[-1].hear()[1][0].tobytes()
            except ChorosError as gone:
                error = str(gone)
        answer = {"error": "MeetingTimeout", "text": error} if error else {}
        all_of_it = [np.frombuffer(brought[rank], np.uint8) for rank in sorted(brought)]
        for guest in guests:
            with suppress(ChorosError):  # it has gone; whoever needs it will notice
                guest.tell(answer, all_of_it)
            guest.close()


def ports(secret: bytes) -> list[int]:
    """Return the ports of which a job's first rank takes one where nobody tells a port: two jobs have other ones.

    Example:
        >>> ports(b"one job") == ports(b"one job"), ports(b"one job") == ports(b"another")
        (True, False)
    """
    drawn = hashlib.blake2b(secret, person=b"choros ports", digest_size=2 * _PORTS).digest()
    return [20_000 + int.from_bytes(drawn[i : i + 2], "little") % 12_000 for i in range(0, len(drawn), 2)]


def come(place: str, secret: bytes, rank: int, timeout: float) -> Callable[[bytes], list[bytes]]:
    """Return what brings this rank's bytes to a ``Rendezvous``, once, and returns everybody's.

    Args:
        place: str. ``host:port`` of the meeting.
        secret: bytes.
        rank: int.
        timeout: float. Seconds for all to come.

    Raises:
        PeerFailed, MeetingTimeout: when called: nobody is there, or not all come.
    """

    def swap(mine: bytes) -> list[bytes]:
        end = dial(place, secret, {"rank": rank, "timeout": timeout}, timeout)
        channel = Channel(end, f"The meeting at {place}", timeout + 5.0)
        try:
            return [array.tobytes() for array in channel.ask({}, [np.frombuffer(mine, np.uint8)])[1]]
        finally:
            channel.close()

    return swap
