"""Process group over TCP: each rank has a socket to every other rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence

from choros.comm.p2p.group import MessageGroup
from choros.comm.shm.group_header import format_ranks
from choros.comm.tcp.abort_signal import end_together
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, dial
from choros.comm.tcp.connections import ConnectionMesh, TcpMessages
from choros.errors import CommTimeoutError, PeerLostError

ByteExchange = Callable[[bytes], Sequence[bytes]]


class TcpGroup(MessageGroup):
    """All ranks, over TCP; implements ``choros.comm.group.Group``.

    Args:
        rank, size: int.
        exchange: callable. Receives this rank's bytes and returns every rank's bytes, in the order of the ranks. The
            ranks exchange their addresses by it.
        secret: bytes. The job's secret, the same on all ranks.
        address: str. Address of this host for the other ranks; see
            ``choros.cluster.hardware.network_address.own_address``. Defaults to "127.0.0.1".
        timeout: float. Seconds that one wait may last. Defaults to 300.
        spin: float. Seconds to poll before sleeping. Defaults to 50 us, or 0 if a machine has more ranks than cores.

    Raises:
        CommTimeoutError: not all ranks connected within the time limit.
        PeerLostError: a rank cannot be reached.

    Example:
        >>> TcpGroup(0, 1, lambda data: [data], b"secret").gather(b"hello")
        [b'hello']
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: ByteExchange,
        secret: bytes,
        address: str = "127.0.0.1",
        timeout: float = 300.0,
        *,
        spin: float | None = None,
    ) -> None:
        where = f"rank {rank} on {os.uname().nodename}"
        deadline = time.monotonic() + timeout
        # The listener opens before the addresses are exchanged: a rank that has an address can connect at once.
        with AuthListener(address, secret, RankGreeting) as listener:
            addresses = [
                json.loads(text) for text in exchange(json.dumps([listener.address, os.uname().nodename]).encode())
            ]
            sockets = {}
            # A rank connects to all lower ranks and accepts all higher ranks, so each pair has one socket.
            for peer in range(rank):
                try:
                    # No deadlock although every rank first connects and then accepts: the listener's thread answers
                    # handshakes meanwhile.
                    sock = dial(addresses[peer][0], secret, RankGreeting(rank), deadline - time.monotonic())
                except PeerLostError as error:
                    raise PeerLostError(f"{where} cannot reach rank {peer} on {addresses[peer][1]}. {error}") from None
                sockets[peer] = sock, f"rank {peer} on {addresses[peer][1]}"
            missing = set(range(rank + 1, size))
            while missing:
                try:
                    greeting, sock = listener.next_peer(deadline - time.monotonic())
                except CommTimeoutError:
                    raise CommTimeoutError(
                        f"{where} waited {timeout:g} s at {listener.address} for {format_ranks(sorted(missing))} of "
                        f"{size}, which may be busy or gone, or cannot reach this host: name a network that all ranks "
                        "share in CHOROS_NETWORK, or check the firewall.",
                        tuple(sorted(missing)),
                    ) from None
                missing.discard(greeting.rank)
                sockets[greeting.rank] = sock, f"rank {greeting.rank} on {addresses[greeting.rank][1]}"
        self._mesh = ConnectionMesh(sockets)
        super().__init__(TcpMessages(self._mesh, rank, range(size)), timeout, spin=spin)

    def end_together(self) -> None:
        """Let an uncaught exception on one rank end all ranks, for a launcher that does not end them."""
        end_together(self._mesh, f"rank {self.rank} on {os.uname().nodename}")
