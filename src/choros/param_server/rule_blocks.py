"""Application of a rule's three functions to vectors, block by block.

Every exchange calls ``propose``, ``merge`` and ``adopt`` here. Only ``fused_update`` calls them elsewhere: once, with
stand-ins for vectors, to record what they calculate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from choros.algorithms import ExchangeInfo
from choros.comm import dtypes
from choros.errors import InvalidInputError
from choros.param_server.merge_rule import MergeRule
from choros.types import Array

BLOCK = 1 << 15  # values: the vectors of a block fit a core's cache, which halves the memory traffic of expressions

Message = tuple[slice, Array]


class BlockRule:
    """A rule for whole vectors. Where it is elementwise, its functions get blocks of 32 Ki values, else whole vectors.

    Args:
        rule: MergeRule. An algorithm, or another object with its three functions.

    Attributes:
        uses_seen: bool. False if the rule does not read ``seen``. Then ``merge`` does not write it.

    Example:
        >>> import numpy as np
        >>> from choros.algorithms import AEASGD
        >>> rule = BlockRule(AEASGD(alpha=0.25))
        >>> local, center = np.ones(1), np.zeros(1)
        >>> rule.merge(rule.messages(local, center, 8), ExchangeInfo(), center, [], center, [], (local, center))
        []
        >>> local.tolist(), center.tolist()
        ([0.75], [0.25])
    """

    def __init__(self, rule: MergeRule) -> None:
        self.rule = rule
        self.uses_seen: bool = getattr(rule, "uses_seen", True)

    def blocks(self, count: int) -> list[slice]:
        """Return the slices of a vector that the functions get one at a time.

        Args:
            count: int. The vector's length.

        Example:
            >>> from choros.algorithms import ADAG, DiLoCo
            >>> BlockRule(DiLoCo()).blocks(40_000)
            [slice(0, 32768, None), slice(32768, 40000, None)]
            >>> BlockRule(ADAG()).blocks(40_000)
            [slice(0, 40000, None)]
        """
        return dtypes.blocks(count, BLOCK) if self.rule.elementwise else [slice(0, count)]

    def messages(self, local: Array, seen: Array, window: int) -> Iterator[Message]:
        """Yield the worker's message, block by block. A block may be a view of ``local``."""
        for block in self.blocks(local.size):
            yield block, self.rule.propose(local[block], seen[block], window)

    def write_message(self, local: Array, seen: Array, window: int, out: Array) -> None:
        """Write the worker's message to ``out``."""
        for block, message in self.messages(local, seen, window):
            out[block] = message

    def divide(self, message: Array) -> Iterator[Message]:
        """Yield the blocks of a whole message."""
        for block in self.blocks(message.size):
            yield block, message[block]

    def merge(
        self,
        messages: Iterable[Message],
        info: ExchangeInfo,
        center: Array,
        memory: Sequence[Array],
        new_center: Array,
        new_memory: Sequence[Array] | None,
        worker: tuple[Array, Array] | None = None,
    ) -> list[int]:
        """Merge a message into a center; the worker adopts the center that the rule shows.

        Args:
            messages: the blocks of one message, as of ``messages``. Each is read before the next one is requested.
            info: ExchangeInfo. Argument of the rule's ``merge``.
            center: flat array.
            memory: flat arrays, of the center's size.
            new_center: receives the merged center. May be ``center``.
            new_memory: receive the memory vectors that the rule returns as new ones. May be ``memory``. None: they are
                not written.
            worker: None, or ``(local, seen)``. They become the result of ``adopt`` and, if the rule uses it, the center
                that is shown. ``seen`` may be ``center``.

        Returns:
            list of int. The indices of the memory vectors that were written.

        Raises:
            InvalidInputError: the rule returned another number of memory vectors.
        """
        rule, written = self.rule, list[int]()
        for block, message in messages:
            old, old_memory = center[block], tuple(vector[block] for vector in memory)
            new, returned = rule.merge(old, message, info, old_memory)
            if len(returned) != len(old_memory):
                raise InvalidInputError(
                    f"{type(rule).__name__}: merge returned {len(returned)} memory vectors and was given "
                    f"{len(old_memory)}: return as many as `start` does."
                )
            for i, (vector, before) in enumerate(zip(returned, old_memory, strict=True)):
                if new_memory is None or (vector is before and i not in written):
                    continue
                if i not in written:
                    if new_memory[i] is not memory[i]:
                        # Another buffer has older values: the blocks before the first change are copied.
                        new_memory[i][: block.start] = memory[i][: block.start]
                    written.append(i)
                new_memory[i][block] = vector
            if worker is not None:
                # The message may be a view of ``local``, and the new center the message. It must not change with it.
                new = new.copy() if np.may_share_memory(new, worker[0]) else new
                self._adopt(block, worker, old if rule.shows == "before" else new, new_center)
            new_center[block] = new  # last, as ``old``, which the worker adopts, may be a view of it
        return written

    def adopt(self, local: Array, seen: Array, shown: Array) -> None:
        """Let a worker continue from the center that it is shown: write ``local`` and, if it is used, ``seen``."""
        for block in self.blocks(local.size):
            self._adopt(block, (local, seen), shown[block])

    def _adopt(self, block: slice, worker: tuple[Array, Array], shown: Array, center: Array | None = None) -> None:
        local, seen = worker
        local[block] = self.rule.adopt(local[block], shown)
        if self.uses_seen and seen is not center:
            seen[block] = shown
