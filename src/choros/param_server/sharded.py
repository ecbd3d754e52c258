"""A centre between hosts: one contiguous part of it in the memory of each host, served to the others over sockets.

A worker proposes and adopts itself; only its message and what the centre shows cross the network, once each way. The
merge is the host's own, under the same lock as for the workers of that host, so nothing differs but the way there.
With several parts a worker sends to all hosts before it awaits any, and clock and staleness are each part's own. What
it asks may be asked once more, of a server that was started again: ``choros.param_server.shard_service``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from choros.comm.dtypes import blocks
from choros.comm.group import Rule
from choros.errors import ChorosError, InvalidInputError
from choros.param_server.shared_memory import BLOCK, SharedMemoryParameterServer
from choros.types import Array, aligned

_NONE = np.zeros(0, np.float32)


class ShardConnection(Protocol):
    """The interface of a connection to a host: ``choros.comm.tcp.reconnecting_client.ReconnectingClient``."""

    timeout: Any

    def ask(self, head: dict[str, Any], arrays: Sequence[Array] = ()) -> tuple[dict[str, Any], list[Array]]:
        """Return the answer."""
        ...

    def tell(self, head: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Ask, and take the answer later."""
        ...

    def hear(self) -> tuple[dict[str, Any], list[Array]]:
        """Take it."""
        ...

    def close(self) -> None:
        """Ask no more."""
        ...


class _Far:
    """A part that another host has, and what this worker knows of it, which it says with each exchange."""

    def __init__(self, part: slice, line: ShardConnection) -> None:
        self.part, self.line = part, line
        self.sent = self.clock = self.times_set = 0
        self.message, self.fresh = _NONE, True

    def counts(self) -> dict[str, int]:
        """Return the number of its exchanges, and the clock and the setting that it saw last."""
        return {"sent": self.sent, "clock": self.clock, "set": self.times_set}

    def met(self, head: dict[str, Any]) -> None:
        """Take the counts of an answer to an exchange, or of a read before the first one."""
        if "taken" in head or self.fresh:
            self.clock, self.times_set = int(head["clock"]), int(head["set"])
        self.sent += "taken" in head and not head["taken"]
        self.fresh = self.fresh and "taken" not in head


class ShardedParameterServer:
    """One worker's hold on a centre of which other hosts have parts; implements ``choros.comm.group.ParameterServer``.

    Args:
        rule: Rule. The algorithm.
        parts: for each part, its slice of the vector, and its server: a SharedMemoryParameterServer of this host, or a
            ShardConnection to another host. The moving statistics belong to the first.

    Attributes:
        timeout: float. Seconds to wait for an answer or a lock.
        place: int. Where the worker is, for the next exchange to commit (``centre_state.word``).

    Example: see ``tests/transport/test_sharded_centre.py``.
    """

    def __init__(
        self, rule: Rule, parts: Sequence[tuple[slice, SharedMemoryParameterServer | ShardConnection]]
    ) -> None:
        self._rule = rule
        self._near = [
            (i, part, at) for i, (part, at) in enumerate(parts) if isinstance(at, SharedMemoryParameterServer)
        ]
        self._far = [
            (i, _Far(part, at)) for i, (part, at) in enumerate(parts) if not isinstance(at, SharedMemoryParameterServer)
        ]
        self._all: list[SharedMemoryParameterServer | ShardConnection] = [at for _, at in parts]
        self.place = 0
        if len(parts) > 1 and not rule.elementwise:
            raise InvalidInputError(f"{type(rule).__name__} looks at the whole vector: its centre cannot be divided.")

    @property
    def kind(self) -> str:
        """The kind of the center, for people."""
        return f"a centre divided among {len(self._all)} hosts" if len(self._all) > 1 else "a centre on the first host"

    def exchange(self, local: Array, seen: Array, window: int, others: Array) -> int:
        """Propose, merge and adopt; the first part's staleness. See ``SharedMemoryParameterServer.exchange``."""
        staleness = 0
        for i, far in self._far:
            message = self._propose(far, local[far.part], seen[far.part], window)
            told = {"op": "exchange", "window": window, "place": self.place, **far.counts()}
            far.line.tell(told, [message, _mine(i, others)])
        for i, part, centre in self._near:
            centre.place = self.place
            found = centre.exchange(local[part], seen[part], window, _mine(i, others))
            staleness = found if i == 0 else staleness
        for i, far, head, (shown, mean) in self._heard():
            self._adopt(local[far.part], seen[far.part], shown, head["taken"])
            _mine(i, others)[:] = mean
            staleness = int(head["staleness"]) if i == 0 else staleness
        return staleness

    def leave(self, local: Array, seen: Array, window: int, others: Array) -> None:
        """Leave what an exchange now would bring, for ``trial``. See ``SharedMemoryParameterServer.leave``."""
        for i, far in self._far:
            message = self._propose(far, local[far.part], seen[far.part], window)
            far.line.tell({"op": "pending", "window": window, **far.counts()}, [message, _mine(i, others)])
        for i, part, centre in self._near:
            centre.leave(local[part], seen[part], window, _mine(i, others))
        self._heard()

    def trial(self, out: Array, others: Array) -> None:
        """Copy out the centre with what all workers have left. See ``SharedMemoryParameterServer.trial``."""
        for _, far in self._far:
            far.line.tell({"op": "trial"})
        for i, part, centre in self._near:
            centre.trial(out[part], _mine(i, others))
        for i, far, _, (vector, mean) in self._heard():
            out[far.part] = vector
            _mine(i, others)[:] = mean

    def _heard(self) -> list[tuple[int, _Far, dict[str, Any], list[Array]]]:
        """Return all answers; what one host has to complain of comes after all have answered."""
        found, wrong = [], None
        for i, far in self._far:
            try:
                head, arrays = far.line.hear()
            except ChorosError as error:
                wrong = wrong or error
            else:
                if "clock" in head:
                    far.met(head)
                found.append((i, far, head, arrays))
        if wrong is not None:
            raise wrong
        return found

    def _propose(self, far: _Far, local: Array, seen: Array, window: int) -> Array:
        """Return the message for a part, which stays as it is until the answer has come."""
        if not self._rule.elementwise:
            return np.asarray(self._rule.propose(local, seen, window), local.dtype)
        if far.message.size != local.size or far.message.dtype != local.dtype:
            far.message = aligned(local.size, local.dtype)
        for part in blocks(local.size, BLOCK):
            far.message[part] = self._rule.propose(local[part], seen[part], window)
        return far.message

    def _adopt(self, local: Array, seen: Array, shown: Array, taken: bool) -> None:
        if taken:
            local[:] = seen[:] = shown
            return
        keep = getattr(self._rule, "uses_seen", True)
        for part in blocks(local.size, BLOCK) if self._rule.elementwise else [slice(0, local.size)]:
            local[part] = self._rule.adopt(local[part], shown[part])
            if keep:
                seen[part] = shown[part]

    def read(self, out: Array, others: Array) -> int:
        """Copy the centre out, each part whole; returns the first part's clock."""
        clock = 0
        for _, far in self._far:
            far.line.tell({"op": "read"})
        for i, part, centre in self._near:
            found = centre.read(out[part], _mine(i, others))
            clock = found if i == 0 else clock
        for i, far, head, (vector, mean) in self._heard():
            out[far.part] = vector
            _mine(i, others)[:] = mean
            clock = int(head["clock"]) if i == 0 else clock
        return clock

    def replace(self, centre: Array, others: Array) -> None:
        """Set the centre and the moving statistics: every worker's next exchange takes them as they are.

        Each host is asked first how often its part was set, and sets it only where that is still so: asked twice, it
        sets it once. Where somebody else set it meanwhile, theirs is the later one.
        """
        for _, far in self._far:
            far.line.tell({"op": "times"})
        times = [(i, far, head["set"]) for i, far, head, _ in self._heard()]
        for i, far, before in times:
            far.line.tell({"op": "replace", "set": before}, [centre[far.part], _mine(i, others)])
        for i, part, near in self._near:
            near.replace(centre[part], _mine(i, others))
        self._heard()

    @property
    def timeout(self) -> float:
        """Seconds to wait for an answer or a lock."""
        return float(self._all[0].timeout)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        for at in self._all:
            at.timeout = seconds

    def close(self) -> None:
        """Free what this rank holds."""
        for at in self._all:
            at.close()


def _mine(part: int, others: Array) -> Array:
    """The moving statistics, of which the first part has all."""
    return others if part == 0 else others[:0]
