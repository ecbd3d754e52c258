"""The transport of bytes: for all ranks at once (``Group``), or between one worker and a center (``ParameterServer``).

Knows nothing of algorithms, Keras or launchers. Every wait has a limit and its error names who was missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from choros.errors import InvalidInputError
from choros.types import Array

if sys.platform == "win32":
    raise InvalidInputError(
        "Workers that share memory need Linux (or macOS, untested). On Windows run Choros inside WSL 2."
    )


# Takes down what took time: (kind, name, begin, end, bytes). The kind is "call", "step" (of an optimizer), "wait",
# "reduce" or "data" (waiting for the next batch); the times are of ``time.monotonic_ns``; bytes are -1 where they are
# not known.
Trace = Callable[[tuple[str, str, int, int, int]], object]


@runtime_checkable
class Group(Protocol):
    """All ranks at once. Each call is made by every rank in the same order.

    Attributes:
        rank, size: int.
        timeout: float. Seconds that one wait may last.
        warn_after: float. Seconds after which a wait is told on stderr, once; infinite: never.
        doing: str. What the caller is about, for people to read where it waits too long; ``""``: nothing any more.
        trace: Trace. Is told of every wait and reduction; None: nobody is.
    """

    rank: int
    size: int
    timeout: float
    warn_after: float
    doing: str
    trace: Trace | None

    def slot(self, count: int, dtype: Any) -> Array:
        """A buffer of ``count`` values that ``sum_slots`` reads: write there what is to be summed (no copy)."""
        ...

    def sum_slots(self, count: int, dtype: Any) -> Array:
        """Sum all ranks' slots; a view of the result, bit-equal everywhere, good until the next call."""
        ...

    def sum(self, x: Array) -> Array:
        """A new array: the sum over ranks, any shape and any numeric dtype."""
        ...

    def mean(self, x: Array) -> Array:
        """A new array: the mean over ranks."""
        ...

    def gather(self, x: bytes) -> list[bytes]:
        """Every rank's bytes (any lengths), in the order of the ranks, on every rank."""
        ...

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's array on every rank (a new array); the same shape and dtype everywhere."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come."""
        ...

    def close(self) -> None:
        """Free what this rank holds."""
        ...


def kind_of(group: Group) -> str:
    """Return what a group is, for people: ``shared memory``, ``MPI``, ``torch (gloo) over shared memory`` ...

    Args:
        group: any; one of a package may have a ``kind`` too, else it is called by its class.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> kind_of(SingleRankGroup())
        'one rank'
    """
    return str(getattr(group, "kind", type(group).__name__))


class Rule(Protocol):
    """The part of an algorithm that a center needs (the shape of ``choros.algorithms.Algorithm``)."""

    @property
    def shows(self) -> Any:
        """The center that the worker is shown: "before" or "after" the merge."""
        ...

    @property
    def elementwise(self) -> Any:
        """True if the functions may be applied block by block."""
        ...

    def propose(self, local: Any, seen: Any, window: int) -> Any:
        """Return what the worker puts forward."""
        ...

    def merge(self, centre: Any, message: Any, meeting: Any, memory: Any) -> tuple[Any, Any]:
        """Return the new centre and the new memory; a memory vector returned as it came is not rewritten."""
        ...

    def adopt(self, local: Any, shown: Any) -> Any:
        """Return what the worker goes on with."""
        ...

    def replaced(self, centre: Any, memory: Any) -> Any:
        """Return the memory that goes with a centre which was set; a rule without this method keeps its memory."""
        ...


@runtime_checkable
class ParameterServer(Protocol):
    """One centre that workers meet in their own time; clock and staleness are counted once, under its lock."""

    def exchange(self, local: Array, seen: Array, window: int, others: Array) -> int:
        """Propose, merge and adopt in one locked pass; ``local``, ``seen`` and ``others`` are updated in place.

        Where a controller has set the centre since, the worker takes it as it is and nothing is merged.

        Returns the staleness that this exchange had.
        """
        ...

    def read(self, out: Array, others: Array) -> int:
        """Copy the centre (and the averaged moving statistics) out, whole; returns the clock."""
        ...

    def close(self) -> None:
        """Free what this rank holds."""
        ...
