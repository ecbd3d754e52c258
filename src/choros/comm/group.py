"""Interfaces of communication: ``Group`` for all ranks at once, ``ParameterServer`` for one worker and the center.

This module knows nothing of algorithms, Keras or launchers. Every wait has a time limit, and its error names the
missing ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from numpy.typing import DTypeLike

from choros.errors import InvalidInputError
from choros.types import Array

if sys.platform == "win32":
    raise InvalidInputError(
        "Workers that share memory need Linux (or macOS, untested). On Windows run Choros inside WSL 2."
    )


# Receiver of timings: (kind, name, begin, end, bytes). The kind is "call", "step" (of an optimizer), "wait", "reduce",
# "data" (the wait for the next batch), "compute" or "exchange". Times are in nanoseconds of ``time.monotonic_ns``;
# bytes are -1 if unknown.
Trace = Callable[[tuple[str, str, int, int, int]], object]


@runtime_checkable
class Group(Protocol):
    """All ranks at once. Every rank makes the same calls in the same order.

    Attributes:
        rank, size: int.
        timeout: float. Seconds that one wait may last.
        warn_after: float. Seconds after which a wait is reported on stderr, once; infinite for never.
        doing: str. The caller's present activity, for messages about long waits; ``""`` for none.
        trace: Trace or None. Receives the timing of every wait and reduction.
    """

    rank: int
    size: int

    @property
    def timeout(self) -> float:
        """Seconds that one wait may last."""
        ...

    @timeout.setter
    def timeout(self, seconds: float) -> None: ...

    @property
    def warn_after(self) -> float:
        """Seconds after which a wait is reported on stderr, once."""
        ...

    @warn_after.setter
    def warn_after(self, seconds: float) -> None: ...

    @property
    def doing(self) -> str:
        """The present activity of this rank."""
        ...

    @doing.setter
    def doing(self, text: str) -> None: ...

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait and reduction, or None."""
        ...

    @trace.setter
    def trace(self, trace: Trace | None) -> None: ...

    def slot(self, count: int, dtype: DTypeLike) -> Array:
        """Return the buffer of ``count`` values that ``sum_slots`` reads: write the summands into it (no copy)."""
        ...

    def sum_slots(self, count: int, dtype: DTypeLike) -> Array:
        """Sum all ranks' slots; return a view of the result, bit-equal on every rank, valid until the next call."""
        ...

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks, a new array; any shape and any numeric dtype."""
        ...

    def mean(self, x: Array) -> Array:
        """Return the mean over ranks, a new array."""
        ...

    def gather(self, x: bytes) -> list[bytes]:
        """Return every rank's bytes (any lengths), in the order of the ranks, on every rank."""
        ...

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return the root's array on every rank, a new array; shape and dtype must be equal on all ranks."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...

    def close(self) -> None:
        """Free this rank's resources."""
        ...


def kind_of(group: Group) -> str:
    """Return a group's kind for messages: ``shared memory``, ``MPI``, ``torch (gloo) over shared memory`` ...

    Args:
        group: any group. Without an attribute ``kind`` the result is the name of its class.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> kind_of(SingleRankGroup())
        'one rank'
    """
    return str(getattr(group, "kind", type(group).__name__))


def abort_waits(group: Group, reason: str) -> None:
    """Make this rank's waits in a group raise ``PeerLostError``, now and later; any thread may call.

    Args:
        group: any group. Nothing happens if it has no method ``give_up``, such as a group of one rank.
        reason: str. The text of the error.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> abort_waits(SingleRankGroup(), "rank 0 has failed")
    """
    give_up = getattr(group, "give_up", None)
    if give_up is not None:
        give_up(reason)


@runtime_checkable
class ParameterServer(Protocol):
    """The center of asynchronous training, from one worker's view. Clock and staleness are counted under its lock.

    Attributes:
        trace: Trace or None. Receives the timing of every wait for the lock, or for another host.
    """

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait for the lock, or None."""
        ...

    @trace.setter
    def trace(self, trace: Trace | None) -> None: ...

    def exchange(self, local: Array, seen: Array, window: int, statistics: Array) -> int:
        """Propose, merge and adopt in one locked pass; update ``local``, ``seen`` and ``statistics`` in place.

        If a controller has set the center since the worker's last exchange, the worker takes the center as it is, and
        nothing is merged.

        Returns:
            int. The staleness of this exchange: merges by other workers since this worker last saw the center.
        """
        ...

    def read(self, out: Array, statistics: Array, *, adopt: bool = False) -> int:
        """Copy the center into ``out`` and the averaged moving statistics into ``statistics``; return the clock.

        Args:
            out: receives the center.
            statistics: receives the moving statistics.
            adopt: whether the worker trains on from this copy: its next exchange counts staleness from here, and does
                not take a center that was set before. Defaults to False.
        """
        ...

    def close(self) -> None:
        """Free this worker's resources."""
        ...
