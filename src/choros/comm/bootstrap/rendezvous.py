"""Rendezvous of ranks that share only an address and a secret: each rank sends bytes and receives all ranks' bytes."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from choros.comm.shm.group_header import format_ranks
from choros.comm.tcp.auth_socket import AuthListener, NoListenerError, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError, CommTimeoutError, InvalidInputError, PeerLostError

logger = logging.getLogger(__name__)

_PORT_COUNT = 8
_REPORT_SECONDS = 15.0  # seconds of waiting after which a line on stderr names the missing ranks
_UNIQUE_RANK_ADVICE = "give each process of the job a rank of its own, from 0."


@dataclass(frozen=True)
class RendezvousGreeting:
    """A rank connects to the rendezvous.

    Attributes:
        timeout: float. Seconds for all ranks to connect.
        duplicate: bool. Whether the sender listens at another port as a second rank 0.
    """

    rank: int
    timeout: float
    duplicate: bool = False


class Rendezvous:
    """Server of one rendezvous: a thread collects each rank's bytes and sends all bytes to all ranks.

    Args:
        listener: AuthListener. The ranks connect to it.
        size: int. Number of ranks. After the first rank has connected, the others have that rank's ``timeout``.
        from_variable: bool. Whether the secret is CHOROS_SECRET; messages then show a fingerprint of it. Defaults to
            True.

    Example:
        >>> with AuthListener("127.0.0.1", b"secret", RendezvousGreeting) as listener:
        ...     server = Rendezvous(listener, 1)
        ...     join_rendezvous(listener.address, b"secret", 0, 5.0)(b"here")
        [b'here']
    """

    def __init__(self, listener: AuthListener[RendezvousGreeting], size: int, from_variable: bool = True) -> None:
        self._listener, self._size, self._from_variable = listener, size, from_variable
        threading.Thread(target=self._collect, name="choros-rendezvous", daemon=True).start()

    def _collect(self) -> None:
        connections, data_by_rank, error = list[RpcConnection](), dict[int, bytes](), ""
        limit, deadline = 0.0, time.monotonic() + threading.TIMEOUT_MAX
        reported = False
        # After an error the loop goes on until a rank is connected, which then receives the error.
        while len(data_by_rank) < self._size and not (error and data_by_rank):
            remaining = deadline - time.monotonic()
            try:
                greeting, sock = self._listener.next_peer(remaining if reported else min(remaining, _REPORT_SECONDS))
            except CommTimeoutError:
                missing = f"{format_ranks(sorted(set(range(self._size)) - set(data_by_rank)))} of {self._size}"
                if not reported and remaining > _REPORT_SECONDS:
                    reported = bool(data_by_rank)
                    if reported:
                        hint = _secret_hint(self._listener.secret, self._from_variable)
                        logger.warning(f"{missing} did not connect within {_REPORT_SECONDS:g} s{hint}")
                    continue
                error = (
                    f"{missing} did not connect to {self._listener.address} within "
                    f"{limit:g} s: check that they were started and can reach this host."
                )
                break
            rank = greeting.rank
            # A limit of its own: one thread serves all ranks, and a rank that connects and sends nothing must not block
            # the others for the whole time limit.
            connections.append(RpcConnection(sock, f"rank {rank}", 30.0))
            if rank in data_by_rank or greeting.duplicate or not 0 <= rank < self._size:
                processes = "A process" if rank >= self._size else "Two processes"
                error = f"{processes} connected as rank {rank} of {self._size}: {_UNIQUE_RANK_ADVICE}"
                continue
            # The clock starts with the first rank: a scheduler may start the server's process long before the ranks.
            if not data_by_rank:
                limit = greeting.timeout
                deadline = time.monotonic() + limit
            try:
                data_by_rank[rank] = connections[-1].receive()[1][0].tobytes()
            except ChorosError as lost:
                error = str(lost)
        error_type = "InvalidInputError" if _UNIQUE_RANK_ADVICE in error else "CommTimeoutError"
        header = {"error": error_type, "text": error} if error else {}
        arrays = [np.frombuffer(data_by_rank[rank], np.uint8) for rank in sorted(data_by_rank)]
        for connection in connections:
            with suppress(ChorosError):  # the rank is lost; the group's first call will report it
                connection.send(header, arrays)
            connection.close()


def refuse_second_rank_zero(listener: AuthListener[RendezvousGreeting], candidate_ports: Sequence[int]) -> None:
    """Refuse a second rank 0 on this host, which would listen at another of the job's candidate ports.

    Args:
        listener: AuthListener. Of this rank.
        candidate_ports: the job's ports, in the order in which a listener tries them.

    Raises:
        InvalidInputError: another rank 0 of this job listens.
    """
    for port in candidate_ports[: candidate_ports.index(int(listener.address.rpartition(":")[2]))]:
        with suppress(PeerLostError):  # the port is free, or belongs to another job
            dial(
                f"{listener.address.rpartition(':')[0] or '127.0.0.1'}:{port}",
                listener.secret,
                RendezvousGreeting(0, 0.0, duplicate=True),
                0.0,
            ).close()
            raise InvalidInputError(
                f"Another process on {os.uname().nodename} is rank 0 of this job (it holds port {port}, with the same "
                f"secret): {_UNIQUE_RANK_ADVICE}"
            )


def _secret_hint(secret: bytes, from_variable: bool) -> str:
    """Return a hint on the secret for a message. Its fingerprint, three bytes of a hash, does not reveal the secret."""
    if not from_variable:
        return "."
    fingerprint = hashlib.blake2b(secret, person=b"choros mark", digest_size=3).hexdigest()
    return (
        f" (this process' CHOROS_SECRET has the fingerprint {fingerprint}: a process with another fingerprint belongs "
        "to another job)."
    )


def ports(secret: bytes) -> list[int]:
    """Return a job's candidate ports, derived from its secret. Rank 0 takes the first free one if no port is given.

    Ranks with the same secret compute the same ports, and two jobs rarely have a common port.

    Example:
        >>> ports(b"one job") == ports(b"one job"), ports(b"one job") == ports(b"another")
        (True, False)
    """
    digest = hashlib.blake2b(secret, person=b"choros ports", digest_size=2 * _PORT_COUNT).digest()
    # 20,000 to 31,999 is below the ports that Linux gives to outgoing connections (32,768 to 60,999), so no outgoing
    # connection takes a candidate by chance.
    return [20_000 + int.from_bytes(digest[index : index + 2], "little") % 12_000 for index in range(0, len(digest), 2)]


def join_rendezvous(
    place: str, secret: bytes, rank: int, timeout: float, from_variable: bool = True
) -> Callable[[bytes], list[bytes]]:
    """Return a function that sends this rank's bytes to a ``Rendezvous`` and returns all ranks' bytes. Call it once.

    Args:
        place: str. ``host:port`` of the rendezvous.
        secret: bytes. The job's secret.
        rank: int. This rank.
        timeout: float. Seconds for all ranks to connect.
        from_variable: bool. See ``Rendezvous``. Defaults to True.

    Raises:
        PeerLostError: from the function; no listener answers. CommTimeoutError: not all ranks connected.
    """

    def exchange(data: bytes) -> list[bytes]:
        greeting = RendezvousGreeting(rank, timeout)
        try:
            sock = dial(place, secret, greeting, min(timeout, _REPORT_SECONDS))
        except NoListenerError as no_listener:
            if timeout <= _REPORT_SECONDS:
                raise
            hint = _secret_hint(secret, from_variable)
            logger.warning(f"rank {rank}: {no_listener} It tries for {timeout - _REPORT_SECONDS:g} s more{hint}")
            sock = dial(place, secret, greeting, timeout - _REPORT_SECONDS)
        # The server waits up to ``timeout`` for the other ranks before it replies: the reply needs a little longer.
        connection = RpcConnection(sock, f"The rendezvous at {place}", timeout + 5.0)
        try:
            return [array.tobytes() for array in connection.request({}, [np.frombuffer(data, np.uint8)])[1]]
        finally:
            connection.close()

    return exchange
