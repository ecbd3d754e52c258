"""The ranks of a job that meet over sockets: each has one to every other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence

from choros.comm.p2p.group import MessageGroup
from choros.comm.shm.group_header import names
from choros.comm.tcp.abort_signal import end_together
from choros.comm.tcp.auth_socket import AuthListener, dial
from choros.comm.tcp.connections import ConnectionMesh, TcpMessages
from choros.errors import CommTimeoutError, PeerLostError

Swap = Callable[[bytes], Sequence[bytes]]


class TcpGroup(MessageGroup):
    """All ranks, over TCP; implements ``choros.comm.group.Group``.

    Args:
        rank, size: int.
        swap: callable. Gives all every rank's bytes, in the order of the ranks: how they learn each other's ports.
        secret: bytes. The same on all ranks, and known to nobody else.
        address: str. Where the others reach this host; see ``choros.cluster.hardware.network_address.own_address``.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to look before sleeping; by default 0 where a machine has more ranks than cores.

    Raises:
        CommTimeoutError: not all ranks have come.
        PeerLostError: a rank cannot be reached.

    Example:
        >>> TcpGroup(0, 1, lambda mine: [mine], b"secret").gather(b"hello")
        [b'hello']
    """

    def __init__(
        self,
        rank: int,
        size: int,
        swap: Swap,
        secret: bytes,
        address: str = "127.0.0.1",
        timeout: float = 300.0,
        *,
        spin: float | None = None,
    ) -> None:
        where = f"rank {rank} on {os.uname().nodename}"
        until = time.monotonic() + timeout
        with AuthListener(address, secret) as door:
            said = [json.loads(text) for text in swap(json.dumps([door.place, os.uname().nodename]).encode())]
            ends = {}
            for other in range(rank):
                try:
                    end = dial(said[other][0], secret, {"rank": rank}, until - time.monotonic())
                except PeerLostError as error:
                    raise PeerLostError(f"{where} cannot reach rank {other} on {said[other][1]}. {error}") from None
                ends[other] = end, f"rank {other} on {said[other][1]}"
            missing = set(range(rank + 1, size))
            while missing:
                try:
                    hello, end = door.next(until - time.monotonic())
                except CommTimeoutError:
                    raise CommTimeoutError(
                        f"{where} waited {timeout:g} s at {door.place} for {names(sorted(missing))} of {size}, which "
                        "may be busy or gone, or cannot reach this host: name a network that all share in "
                        "CHOROS_NETWORK, or see to its firewall.",
                        tuple(sorted(missing)),
                    ) from None
                other = int(hello["rank"])
                missing.discard(other)
                ends[other] = end, f"rank {other} on {said[other][1]}"
        self._links = ConnectionMesh(ends)
        super().__init__(TcpMessages(self._links, rank, range(size)), timeout, spin=spin)

    def end_together(self) -> None:
        """Have an exception that nobody catches on one rank end all ranks, for the launcher does not."""
        end_together(self._links, f"rank {self.rank} on {os.uname().nodename}")
