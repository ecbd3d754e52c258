"""Synchronous exchange: all ranks all-reduce their proposals, and each keeps an identical copy of the center."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from choros.algorithms import Algorithm, ExchangeInfo
from choros.comm.group import Group
from choros.param_server.rule_blocks import BlockRule, Message
from choros.types import Array


class SyncExchange:
    """Exchange with a replicated center: every rank merges the same sum into its copy, so all copies are bit-equal.

    ::

        message = sum_r propose_r / n          or, for a weighted algorithm,
        message = sum_r n_r propose_r / sum_r n_r

    Each rank writes its proposal into the group's buffer. After the all-reduce, an elementwise algorithm merges and
    adopts in blocks of 32 Ki values, which keeps temporaries small.

    Args:
        algorithm: Algorithm. Bound (``algorithm.bound``) to the group's size.
        group: Group. All ranks that take part in the exchange.
        center: flat float array, the same on every rank. It is kept, and changed in place.

    Attributes:
        center: the center, the same on every rank after each exchange.
        exchanges: int. Exchanges so far.
        seconds: float. Time spent in exchanges, including waiting for other ranks.

    Example:
        >>> import numpy as np
        >>> from choros.algorithms import EASGD
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> exchange = SyncExchange(EASGD(alpha=0.25), SingleRankGroup(), np.zeros(2))
        >>> local = np.ones(2)
        >>> exchange.run(local, window=8, rows=256)
        >>> local.tolist(), exchange.center.tolist()
        ([0.75, 0.75], [0.25, 0.25])
    """

    def __init__(self, algorithm: Algorithm, group: Group, center: Array) -> None:
        self.algorithm, self.group, self.center = algorithm, group, center
        self.memory = tuple(algorithm.start(center, group.size))
        # If workers adopt the merged center, the last seen center is the center itself. If not, it needs a copy.
        apart = algorithm.uses_seen and algorithm.shows == "before"
        self.seen = center.copy() if apart else center
        self.exchanges = 0
        self.seconds = 0.0
        self._rule = BlockRule(algorithm)

    def run(self, local: Array, window: int, rows: int) -> None:
        """Exchange with all ranks, and adopt the result. Collective: every rank must call it.

        Args:
            local: this worker's vector, of the center's length and dtype; changed in place.
            window: int. Its optimizer steps since the last exchange.
            rows: int. Samples trained since then: this rank's weight if the algorithm is weighted. Then a rank without
                samples is ignored, and the center stays unchanged if no rank has any.

        Raises:
            ValueError: ``local`` has another length or dtype than the center.
        """
        begun = time.perf_counter()
        info, center, memory = ExchangeInfo(workers=self.group.size), self.center, self.memory
        messages = self._messages(local, window, rows)
        self._rule.merge(messages, info, center, memory, center, memory, (local, self.seen))
        self.exchanges += 1
        self.seconds += time.perf_counter() - begun

    def trial(self, local: Array, window: int, rows: int) -> Array:
        """Return the center that ``run`` would produce now, and change no state. Collective: every rank calls it.

        Args:
            local: as in ``run``, but not changed.
            window: int. As in ``run``.
            rows: int. As in ``run``.

        Example:
            >>> import numpy as np
            >>> from choros.algorithms import EASGD
            >>> from choros.comm.single_rank_group import SingleRankGroup
            >>> exchange = SyncExchange(EASGD(alpha=0.25), SingleRankGroup(), np.zeros(1))
            >>> exchange.trial(np.ones(1), window=8, rows=256), exchange.center
            (array([0.25]), array([0.]))
        """
        info, center = ExchangeInfo(workers=self.group.size), self.center.copy()
        self._rule.merge(self._messages(local, window, rows), info, self.center, self.memory, center, None)
        return center

    def _messages(self, local: Array, window: int, rows: int) -> Iterator[Message]:
        """Yield the mean proposal, block by block. Yield nothing if the total weight is 0."""
        if local.shape != self.center.shape or local.dtype != self.center.dtype:
            raise ValueError(
                f"rank {self.group.rank}: the vector has shape {local.shape} and type {local.dtype}, the center "
                f"{self.center.shape} and {self.center.dtype}: pass the vector of the model's replica."
            )
        if self.group.size == 1:  # the message of the only rank is the mean, to the last bit
            yield from self._rule.messages(local, self.seen, window) if rows or not self.algorithm.weighted else []
        else:
            total, weight = self._sum(local, window, rows)
            for part, message in self._rule.divide(total) if weight else []:
                yield part, message / weight

    def _sum(self, local: Array, window: int, rows: int) -> tuple[Array, float]:
        """All-reduce the proposals; return their sum and the divisor."""
        group, size, weighted = self.group, self.center.size, self.algorithm.weighted
        slot = group.slot(size + weighted, local.dtype)
        for part, message in self._rule.messages(local, self.seen, window):
            slot[part] = message
            if weighted and rows:
                slot[part] *= rows
        if not weighted:
            return group.sum_slots(size, local.dtype), group.size
        if not rows:
            slot[:] = 0  # NaN or inf of a rank without samples must not reach the sum
        slot[size] = rows
        total = group.sum_slots(size + 1, local.dtype)
        return total[:size], float(total[size])

    def replace(self, center: Array) -> None:
        """Set the center to new values, such as those a callback assigned. Every rank must pass the same values."""
        self.center[...] = center
        self.seen[...] = center
        replaced = self.algorithm.replaced(self.center, self.memory)
        for vector, new in zip(self.memory, replaced, strict=True):
            if new is not vector:
                vector[...] = new

    def state(self) -> dict[str, Any]:
        """Return a copy of the state for a checkpoint."""
        return {
            "center": self.center.copy(),
            "seen": self.seen.copy(),
            "memory": [vector.copy() for vector in self.memory],
            "exchanges": self.exchanges,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.seen[...] = state["seen"]
        self.center[...] = state["center"]
        for vector, saved in zip(self.memory, state["memory"], strict=True):
            vector[...] = saved
        self.exchanges, self.seconds = int(state["exchanges"]), float(state["seconds"])
