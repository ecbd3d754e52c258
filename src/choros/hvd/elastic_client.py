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
from typing import Any

from choros.comm.bootstrap import init
from choros.comm.bootstrap.exit_hooks import delay_secondary_failure
from choros.comm.bootstrap.init import ELASTIC
from choros.comm.group import Group
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.auth_socket import dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError, CommTimeoutError, PeerLostError

logger = logging.getLogger(__name__)

_COME = 30.0  # seconds for the first connection to the driver
_LOOK = 1.0  # seconds between two checks of the connection to the driver
_PLACE = ("rank", "size", "local_rank", "local_size")


class ElasticClient:
    """This process's connection to the driver.

    Args:
        told: dict. The driver's address (``place``), this process's number (``member``) and the job's ``secret`` in
            hex.

    Attributes:
        sync: bool. Whether the ranks of this generation take rank 0's state before they continue.
        changed: bool. Whether ranks will join or leave. coming: bool. Whether ranks will join.
        on_broken: functions of the reason (str), called in the receiving thread when this generation is over.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._secret, self._number = bytes.fromhex(told["secret"]), int(told["member"])
        end = dial(told["place"], self._secret, {"member": self._number}, _COME)
        self._line = RpcConnection(end, "the driver of this elastic job (choros run)", 1e9)
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._gone, self._lock = threading.Event(), threading.Lock()
        self.generation, self.broken, self._limit = 0, "", _COME
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
            self._tell({"say": "ask", "sync": sync, "lost": lost, "missing": list(missing)})
            place = self._next("place")
            try:
                self._limit = timeout
                group = self._join(place, timeout)
                group.timeout = timeout
                group.barrier()
                if not self.broken:
                    return group
                lost = self.broken
            except (PeerLostError, CommTimeoutError) as error:  # a rank was lost while the group formed
                if self._gone.is_set():
                    raise
                lost, missing = str(error), tuple(getattr(error, "missing", ()))
            sync = True

    def _join(self, place: dict[str, Any], timeout: float) -> Group:
        _settle(place)
        if place["size"] == 1:
            return SingleRankGroup()
        address = "127.0.0.1" if place["near"] else ""
        secret = hmac.digest(self._secret, f"generation {self.generation}".encode(), "sha256")
        return init.join_by_sockets(place["rank"], place["size"], self._swap, secret, address, timeout)

    def _swap(self, text: bytes) -> list[bytes]:
        self._tell({"say": "swap", "generation": self.generation, "text": text.decode()})
        return [text.encode() for text in self._next("swap", self._limit)["all"]]

    def _next(self, what: str, limit: float = math.inf) -> dict[str, Any]:
        """Return the driver's next message of the given kind.

        Raises:
            PeerLostError: the driver or the generation is lost.
            CommTimeoutError: no such message came within ``limit`` seconds.
            SystemExit: the driver has no place for this process any more.
        """
        until = time.monotonic() + limit
        while True:
            try:
                message = self._said.get(timeout=_LOOK)
            except queue.Empty:
                if self._gone.is_set():
                    raise PeerLostError(f"{self._line.peer} has gone: see what it printed last.") from None
                if time.monotonic() > until:
                    raise CommTimeoutError(
                        f"Not all ranks of generation {self.generation} came in {limit:g} s."
                    ) from None
                continue
            if message["say"] == "leave":
                logger.info(f"process {self._number} is no longer part of this job and exits")
                raise SystemExit(0)
            if message["say"] == what and (what == "place" or message["generation"] == self.generation):
                return message
            if message["say"] == "broken" and what == "swap" and message["generation"] == self.generation:
                raise PeerLostError(f"Generation {self.generation} is over before it began: {message['reason']}")

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._line.receive()[0])
        except (ChorosError, ValueError):
            self._gone.set()
            self._give_up("the driver of this elastic job (choros run) has gone")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.get("say")
        if kind == "ping":
            self._tell({"say": "alive"})
        elif kind == "changed":
            self.coming = self.coming or bool(message.get("coming"))
            self.changed = True
        elif kind == "place":
            self.generation, self.broken = int(message["generation"]), ""
            self.sync, self.changed, self.coming = bool(message["sync"]), False, False
            self._said.put(message)
        elif kind == "broken":
            if message["generation"] == self.generation:
                self._give_up(str(message["reason"]))
            self._said.put(message)
        else:
            self._said.put(message)

    def _give_up(self, reason: str) -> None:
        self.broken = reason
        for give_up in list(self.on_broken):
            give_up(reason)

    def _tell(self, head: dict[str, Any]) -> None:
        with self._lock:
            self._line.send(head)


_now: list[ElasticClient] = []


def membership() -> ElasticClient | None:
    """This process's connection to the driver of an elastic job, made at the first call; None if not elastic."""
    if not _now and os.environ.get(ELASTIC):
        _now.append(ElasticClient(json.loads(os.environ[ELASTIC])))
    return _now[0] if _now else None


def is_elastic() -> bool:
    """Return whether this process belongs to an elastic job, whose ranks join and leave."""
    return bool(os.environ.get(ELASTIC))


def _settle(place: dict[str, Any]) -> None:
    """Set the environment variables from which ``Place.here`` and scripts read the place."""
    nodes, hosts = int(place["nodes"]), ",".join(place["hosts"])
    for name in _PLACE:
        os.environ[f"CHOROS_{name.upper()}"] = os.environ[f"HOROVOD_{name.upper()}"] = str(place[name])
    os.environ |= {"HOROVOD_CROSS_RANK": str(place["node"]), "HOROVOD_CROSS_SIZE": str(nodes)}
    os.environ |= {"CHOROS_NODE": str(place["node"]), "CHOROS_NODES": str(nodes), "CHOROS_HOSTS": hosts}
