"""Client of the elastic driver: a process requests its rank from ``choros run`` and receives changes of the ranks.

A thread receives the driver's messages. It replies to pings and records that ranks will join or leave. When the driver
ends a generation, it aborts this process's waits for other ranks.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from choros.comm.bootstrap import init
from choros.comm.bootstrap.exit_hooks import delay_secondary_failure
from choros.comm.bootstrap.init import ELASTIC
from choros.comm.group import Group
from choros.comm.messages import decode, header_of
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.auth_socket import dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError, CommTimeoutError, PeerLostError
from choros.launch.elastic.messages import (
    OF_DRIVER,
    Alive,
    AssignRank,
    DriverAddress,
    GenerationBroken,
    Leave,
    Ping,
    ProcessGreeting,
    RanksChange,
    RequestRank,
    SharedTexts,
    ShareText,
)

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0  # for the first connection to the driver
_CHECK_SECONDS = 1.0  # between two checks of the connection to the driver
_Message = TypeVar("_Message")
_PLACE = ("rank", "size", "local_rank", "local_size")


class ElasticClient:
    """This process's connection to the driver.

    Args:
        driver: DriverAddress.

    Attributes:
        sync: bool. Whether the ranks of this generation take rank 0's state before they continue.
        changed: bool. Whether ranks will join or leave. coming: bool. Whether ranks will join.
        on_broken: functions of the reason (str), called in the receiving thread when this generation is over.
    """

    def __init__(self, driver: DriverAddress) -> None:
        self._secret, self._number = bytes.fromhex(driver.secret), driver.member
        sock = dial(driver.place, self._secret, ProcessGreeting(self._number), _CONNECT_SECONDS)
        self._connection = RpcConnection(sock, "the driver of this elastic job (choros run)", 1e9)
        self._received: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._driver_lost, self._lock = threading.Event(), threading.Lock()
        self.generation, self.broken, self._limit = 0, "", _CONNECT_SECONDS
        self.sync, self.changed, self.coming = True, False, False
        self.on_broken: list[Callable[[str], object]] = [init.give_up]
        threading.Thread(target=self._listen, name="choros-membership", daemon=True).start()

    def enter(self, timeout: float, sync: bool, lost: str = "", missing: tuple[int, ...] = ()) -> Group:
        """Request a place, set it in the environment variables, and return the group of the generation's ranks.

        Args:
            timeout: seconds that the ranks wait for each other.
            sync: whether this process needs rank 0's state.
            lost: the reason why the last generation is over, if this process saw it; else "".
            missing: ranks that did not answer this process in time.

        Raises:
            PeerLostError: the connection to the driver is lost.
            SystemExit: the driver has no place for this process any more.
        """
        delay_secondary_failure()
        while True:
            init.leave()
            self._send(RequestRank(sync, lost, list(missing)))
            assigned = self._next(AssignRank)
            try:
                self._limit = timeout
                group = self._join(assigned, timeout)
                group.timeout = timeout
                group.barrier()
                # The driver may have ended the generation while its group formed.
                if not self.broken:
                    return group
                lost = self.broken
            except (PeerLostError, CommTimeoutError) as error:  # a rank was lost while the group formed
                if self._driver_lost.is_set():
                    raise
                lost, missing = str(error), tuple(getattr(error, "missing", ()))
            sync = True

    def _join(self, assigned: AssignRank, timeout: float) -> Group:
        _set_environment(assigned)
        if assigned.size == 1:
            return SingleRankGroup()
        address = "127.0.0.1" if assigned.local else ""
        secret = hmac.digest(self._secret, f"generation {self.generation}".encode(), "sha256")
        return init.join_by_sockets(assigned.rank, assigned.size, self._share, secret, address, timeout)

    def _share(self, text: bytes) -> list[bytes]:
        self._send(ShareText(self.generation, text.decode()))
        return [text.encode() for text in self._next(SharedTexts, self._limit).texts]

    def _next(self, kind: type[_Message], limit: float = math.inf) -> _Message:
        """Return the driver's next message of the given kind; of ``SharedTexts``, that of this generation.

        Raises:
            PeerLostError: the driver or the generation is lost.
            CommTimeoutError: no such message came within ``limit`` seconds.
            SystemExit: the driver has no place for this process any more.
        """
        deadline = time.monotonic() + limit
        while True:
            try:
                message = self._received.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                if self._driver_lost.is_set():
                    raise PeerLostError(f"{self._connection.peer} has gone: see what it printed last.") from None
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"Not all ranks of generation {self.generation} came in {limit:g} s."
                    ) from None
                continue
            if isinstance(message, Leave):
                logger.info(f"process {self._number} is no longer part of this job and exits")
                raise SystemExit(0)
            outdated = isinstance(message, SharedTexts) and message.generation != self.generation
            if isinstance(message, kind) and not outdated:
                return message
            broken = isinstance(message, GenerationBroken) and message.generation == self.generation
            if broken and kind is SharedTexts:
                raise PeerLostError(f"Generation {self.generation} is over before it began: {self.broken}")

    def _listen(self) -> None:
        try:
            while True:
                self._handle(OF_DRIVER.decode(self._connection.receive()[0]))
        except (ChorosError, ValueError):
            self._driver_lost.set()
            self._end_generation("the driver of this elastic job (choros run) has gone")

    def _handle(self, message: object) -> None:
        if isinstance(message, Ping):
            self._send(Alive())
        elif isinstance(message, RanksChange):
            # Not put into the queue: no call waits for this message. ``check_host_updates`` reads the flags at the next
            # commit.
            self.coming = self.coming or message.joining
            self.changed = True
        else:
            if isinstance(message, AssignRank):
                self.generation, self.broken = message.generation, ""
                self.sync, self.changed, self.coming = message.sync, False, False
            elif isinstance(message, GenerationBroken) and message.generation == self.generation:
                self._end_generation(message.reason)
            self._received.put(message)

    def _end_generation(self, reason: str) -> None:
        self.broken = reason
        for give_up in list(self.on_broken):
            give_up(reason)

    def _send(self, message: object) -> None:
        # The receiving thread replies to pings while another thread may send.
        with self._lock:
            self._connection.send(header_of(message))


_clients: list[ElasticClient] = []


def membership() -> ElasticClient | None:
    """Return this process's connection to the driver of an elastic job, made at the first call; None if not elastic."""
    if not _clients and os.environ.get(ELASTIC):
        _clients.append(ElasticClient(decode(DriverAddress, json.loads(os.environ[ELASTIC]))))
    return _clients[0] if _clients else None


def is_elastic() -> bool:
    """Return whether this process belongs to an elastic job, whose ranks join and leave."""
    return bool(os.environ.get(ELASTIC))


def _set_environment(assigned: AssignRank) -> None:
    """Set the environment variables from which ``Place.here`` and scripts read the place."""
    node, nodes = str(assigned.node), str(assigned.nodes)
    for name in _PLACE:
        os.environ[f"CHOROS_{name.upper()}"] = os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(assigned, name))
    os.environ |= {"HOROVOD_CROSS_RANK": node, "HOROVOD_CROSS_SIZE": nodes}
    os.environ |= {"CHOROS_NODE": node, "CHOROS_NODES": nodes, "CHOROS_HOSTS": ",".join(assigned.hosts)}
