"""An exchange among ranks that share only an address and a secret: each brings bytes, all get all."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from choros.comm.shm.group_header import names
from choros.comm.tcp.auth_socket import AuthListener, NoListenerError, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError, CommTimeoutError, InvalidInputError, PeerLostError

_PORTS = 8
_SAY = 15.0  # seconds after which whoever waits says so
_OWN = "give each process of the job a rank of its own, from 0."


class Rendezvous:
    """The place of the meeting: collects what each rank brings and gives all to all, once.

    Args:
        door: AuthListener. Where they come.
        size: int. How many. As soon as one is there, the others have the time that it is ready to wait.
        told: bool. Whether the secret is CHOROS_SECRET, which messages then tell apart from others. Defaults to True.

    Example:
        >>> with AuthListener("127.0.0.1", b"secret") as door:
        ...     meeting = Rendezvous(door, 1)
        ...     come(door.place, b"secret", 0, 5.0)(b"here")
        [b'here']
    """

    def __init__(self, door: AuthListener, size: int, told: bool = True) -> None:
        self._door, self._size, self._told = door, size, told
        threading.Thread(target=self._collect, name="choros-rendezvous", daemon=True).start()

    def _collect(self) -> None:
        guests, brought, error = list[RpcConnection](), dict[int, bytes](), ""
        limit, until = 0.0, time.monotonic() + threading.TIMEOUT_MAX
        said = False
        while len(brought) < self._size and not (error and brought):  # somebody is there to be told
            left = until - time.monotonic()
            try:
                hello, end = self._door.next(left if said else min(left, _SAY))
            except CommTimeoutError:
                missing = f"{names(sorted(set(range(self._size)) - set(brought)))} of {self._size}"
                if not said and left > _SAY:
                    said = bool(brought)
                    if said:
                        _say(f"{missing} did not come here within {_SAY:g} s{_see(self._door.secret, self._told)}")
                    continue
                error = (
                    f"{missing} did not come to {self._door.place} within "
                    f"{limit:g} s: see whether they were started, and whether they reach this host."
                )
                break
            rank = int(hello["rank"])
            guests.append(RpcConnection(end, f"rank {rank}", 30.0))
            if rank in brought or "twice" in hello or not 0 <= rank < self._size:
                who = "A process" if rank >= self._size else "Two processes"
                error = f"{who} came as rank {rank} of {self._size}: {_OWN}"
                continue
            if not brought:
                limit = float(hello["timeout"])
                until = time.monotonic() + limit
            try:
                brought[rank] = guests[-1].hear()[1][0].tobytes()
            except ChorosError as gone:
                error = str(gone)
        kind = "InvalidInputError" if _OWN in error else "CommTimeoutError"
        answer = {"error": kind, "text": error} if error else {}
        all_of_it = [np.frombuffer(brought[rank], np.uint8) for rank in sorted(brought)]
        for guest in guests:
            with suppress(ChorosError):  # it has gone; whoever needs it will notice
                guest.tell(answer, all_of_it)
            guest.close()


def alone(door: AuthListener, among: Sequence[int]) -> None:
    """Refuse a second first rank on this host: one that holds another of the ports at which this job meets.

    Args:
        door: of this rank.
        among: the ports that it may have, in the order in which they are tried.

    Raises:
        InvalidInputError: there is one.
    """
    for port in among[: among.index(int(door.place.rpartition(":")[2]))]:
        with suppress(PeerLostError):  # not of this job
            dial(
                f"{door.place.rpartition(':')[0] or '127.0.0.1'}:{port}", door.secret, {"rank": 0, "twice": True}, 0.0
            ).close()
            raise InvalidInputError(
                f"Another process on {os.uname().nodename} is rank 0 of this job (it holds port {port}, with the same "
                f"secret): {_OWN}"
            )


def _say(text: str) -> None:
    print(f"choros: {text}", file=sys.stderr, flush=True)


def _see(secret: bytes, told: bool) -> str:
    """Return what to look at; the mark of a secret does not tell it."""
    if not told:
        return "."
    mark = hashlib.blake2b(secret, person=b"choros mark", digest_size=3).hexdigest()
    return f" (this process' CHOROS_SECRET has the mark {mark}: one with another mark belongs to another job)."


def ports(secret: bytes) -> list[int]:
    """Return the ports of which a job's first rank takes one where nobody tells a port: two jobs have other ones.

    Example:
        >>> ports(b"one job") == ports(b"one job"), ports(b"one job") == ports(b"another")
        (True, False)
    """
    drawn = hashlib.blake2b(secret, person=b"choros ports", digest_size=2 * _PORTS).digest()
    return [20_000 + int.from_bytes(drawn[i : i + 2], "little") % 12_000 for i in range(0, len(drawn), 2)]


def come(place: str, secret: bytes, rank: int, timeout: float, told: bool = True) -> Callable[[bytes], list[bytes]]:
    """Return what brings this rank's bytes to a ``Rendezvous``, once, and returns everybody's.

    Args:
        place: str. ``host:port`` of the meeting.
        secret: bytes.
        rank: int.
        timeout: float. Seconds for all to come.
        told: bool. As of ``Rendezvous``. Defaults to True.

    Raises:
        PeerLostError, CommTimeoutError: when called: nobody is there, or not all come.
    """

    def swap(mine: bytes) -> list[bytes]:
        hello = {"rank": rank, "timeout": timeout}
        try:
            end = dial(place, secret, hello, min(timeout, _SAY))
        except NoListenerError as nobody:
            if timeout <= _SAY:
                raise
            _say(f"rank {rank}: {nobody} It tries for {timeout - _SAY:g} s more{_see(secret, told)}")
            end = dial(place, secret, hello, timeout - _SAY)
        channel = RpcConnection(end, f"The meeting at {place}", timeout + 5.0)
        try:
            return [array.tobytes() for array in channel.ask({}, [np.frombuffer(mine, np.uint8)])[1]]
        finally:
            channel.close()

    return swap
