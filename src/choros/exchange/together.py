"""All workers meet at once; each keeps an equal copy of the centre."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from choros.algorithms import Algorithm, Meeting
from choros.exchange.blocks import blocks
from choros.transport import Group
from choros.types import Array


class Together:
    """The centre is replicated: every rank merges the same sum into its own copy, so all copies are bit-equal.

    ::

        message = sum_r propose_r / n          or, for a weighted algorithm,
        message = sum_r n_r propose_r / sum_r n_r

    Each rank writes its part straight into the group's slot; after the sum, merge and adopt go over blocks of
    64 k values, so that no temporary is as large as the model.

    Args:
        algorithm: Algorithm. Bound (``algorithm.bound``) to the group's size.
        group: Group. Everyone that meets.
        centre: flat float array, the same on every rank; kept, and changed in place.

    Attributes:
        centre: the centre, the same on every rank after each meeting.
        exchanges: int. Meetings so far.
        seconds: float. Time spent in them, waiting included.

    Example:
        >>> import numpy as np
        >>> from choros.algorithms import EASGD
        >>> from choros.transport.local_group import LocalGroup
        >>> together = Together(EASGD(alpha=0.25), LocalGroup(), np.zeros(2))
        >>> local = np.ones(2)
        >>> together.meet(local, window=8, rows=256)
        >>> local.tolist(), together.centre.tolist()
        ([0.75, 0.75], [0.25, 0.25])
    """

    def __init__(self, algorithm: Algorithm, group: Group, centre: Array) -> None:
        self.algorithm, self.group, self.centre = algorithm, group, centre
        self.memory = tuple(algorithm.start(centre, group.size))
        # Shown after the merge, what a worker saw last is the centre as it is; shown before, it is not.
        apart = algorithm.uses_seen and algorithm.shows == "before"
        self.seen = centre.copy() if apart else centre
        self.exchanges = 0
        self.seconds = 0.0
        self._blocks = blocks(algorithm, centre.size)

    def meet(self, local: Array, window: int, rows: int) -> None:
        """Bring what was learnt, take what all learnt; every rank calls it at the same time.

        Args:
            local: this worker's vector, of the centre's length and dtype; changed in place.
            window: int. Its optimizer steps since the last meeting.
            rows: int. The rows it trained since then: its weight where the algorithm weights. A rank of no rows
                then counts nothing, and where none had any nothing changes.

        Raises:
            ValueError: ``local`` does not fit the centre.
        """
        begun = time.perf_counter()
        for part, message in self._messages(local, window, rows):
            self._merge(local, part, message)
        self.exchanges += 1
        self.seconds += time.perf_counter() - begun

    def trial(self, local: Array, window: int, rows: int) -> Array:
        """Return the center as ``meet`` would make it now; nothing changes. Every rank calls it at the same time.

        Args:
            local: as ``meet`` takes it; stays as it is.
            window: int. As ``meet`` takes it.
            rows: int. As ``meet`` takes it.

        Example:
            >>> import numpy as np
            >>> from choros.algorithms import EASGD
            >>> from choros.transport.local_group import LocalGroup
            >>> together = Together(EASGD(alpha=0.25), LocalGroup(), np.zeros(1))
            >>> together.trial(np.ones(1), window=8, rows=256), together.centre
            (array([0.25]), array([0.]))
        """
        centre, meeting = self.centre.copy(), Meeting(workers=self.group.size)
        for part, message in self._messages(local, window, rows):
            held = tuple(vector[part] for vector in self.memory)
            centre[part], _ = self.algorithm.merge(self.centre[part], message, meeting, held)
        return centre

    def _messages(self, local: Array, window: int, rows: int) -> Iterator[tuple[slice, Array]]:
        """Yield what all ranks propose together, part by part; nothing where none of them had a row."""
        if local.shape != self.centre.shape or local.dtype != self.centre.dtype:
            raise ValueError(
                f"rank {self.group.rank} brought {local.shape} values of {local.dtype} to a centre of "
                f"{self.centre.shape} values of {self.centre.dtype}: give the vector that the model's replica gives."
            )
        if self.group.size == 1:  # its own message is the mean, to the last bit
            for part in self._blocks:
                yield part, self.algorithm.propose(local[part], self.seen[part], window)
        else:
            total, weight = self._sum(local, window, rows)
            for part in self._blocks if weight else []:
                yield part, total[part] / weight

    def _sum(self, local: Array, window: int, rows: int) -> tuple[Array, float]:
        """Sum the proposals of all; return the sum and what to divide it by."""
        group, size, propose = self.group, self.centre.size, self.algorithm.propose
        weighted = self.algorithm.weighted
        slot = group.slot(size + weighted, local.dtype)
        for part in self._blocks:
            slot[part] = propose(local[part], self.seen[part], window)
            if weighted and rows:
                slot[part] *= rows
        if not weighted:
            return group.sum_slots(size, local.dtype), group.size
        if not rows:
            slot[:] = 0  # also what is not finite must not count
        slot[size] = rows
        total = group.sum_slots(size + 1, local.dtype)
        return total[:size], float(total[size])

    def _merge(self, local: Array, part: slice, message: Array) -> None:
        """Let a part of the centre become what the message makes of it, and go on from what is shown."""
        algorithm, old = self.algorithm, self.centre[part]
        held = tuple(vector[part] for vector in self.memory)
        new, memory = algorithm.merge(old, message, Meeting(workers=self.group.size), held)
        shown = old if algorithm.shows == "before" else new
        if shown is old and new is message:  # which one worker may have proposed as a view of its vector
            new = message.copy()
        local[part] = algorithm.adopt(local[part], shown)
        if self.seen is not self.centre:
            self.seen[part] = shown
        for view, vector in zip(held, memory, strict=True):
            if vector is not view:
                view[...] = vector
        self.centre[part] = new

    def replace(self, centre: Array) -> None:
        """Set the centre, as a callback did; every rank calls it with the same values."""
        self.centre[...] = centre
        self.seen[...] = centre
        held = self.algorithm.replaced(self.centre, self.memory)
        for vector, new in zip(self.memory, held, strict=True):
            if new is not vector:
                vector[...] = new

    def state(self) -> dict[str, Any]:
        """Return a copy of what a restart needs."""
        return {
            "centre": self.centre.copy(),
            "seen": self.seen.copy(),
            "memory": [vector.copy() for vector in self.memory],
            "exchanges": self.exchanges,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.seen[...] = state["seen"]
        self.centre[...] = state["centre"]
        for vector, kept in zip(self.memory, state["memory"], strict=True):
            vector[...] = kept
        self.exchanges, self.seconds = int(state["exchanges"]), float(state["seconds"])
