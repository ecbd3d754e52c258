"""A check that the ranks of a run still have equal weights, at an epoch's end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from choros.errors import counted
from choros.types import Array

logger = logging.getLogger(__name__)

_PARTS = 16  # partial sums in the fingerprint of a vector
_FAR = 1e-3  # of the weights' norm; rounding alone, on unlike processors, stays below


def mark(vector: Array) -> list[Any]:
    """Return a fingerprint of a vector, plain JSON of some hundred bytes, from which distances can be estimated.

    Args:
        vector: flat, contiguous float array.

    Returns:
        The sum of the bits, the norm, and the sums of 16 stretches: two vectors at a distance d have sums that lie
        about d from each other or, where the difference leans to one side, further.

    Example:
        >>> mark(np.zeros(2, np.float32))
        [0, 0.0, [0.0, 0.0]]
    """
    if not vector.size:
        return [0, 0.0, []]
    even = vector.nbytes // 8 * 8 // vector.itemsize
    bits = int(vector[:even].view(np.uint64).sum()) + sum(vector[even:].view(f"u{vector.itemsize}").tolist())
    parts = min(_PARTS, vector.size)
    even_rows = vector.size // parts * parts
    with np.errstate(all="ignore"):  # other checks report values that are not finite
        sums = vector[:even_rows].reshape(parts, -1).sum(axis=1)
        sums[-1] += vector[even_rows:].sum()
        return [bits, float(np.dot(vector, vector)) ** 0.5, sums.tolist()]


@dataclass(frozen=True)
class ReplicaDivergence:
    """Ranks whose weights differ from those of the majority.

    Attributes:
        far: ranks that must not go on, each with its distance over the norm of the weights.
        near: ranks that differ by rounding.
        usual: int. A rank of the majority.
    """

    far: dict[int, float]
    near: dict[int, float]
    usual: int

    def say(self, hosts: Sequence[str], epoch: int, step: int | None = None) -> str:
        """Return a message that names the ranks far from the others.

        Args:
            hosts: sequence of str. For each rank, its host.
            epoch: int. Counted from 0.
            step: int or None. The step of the epoch, counted from 0; None for the epoch's end.
        """
        named = ", ".join(
            f"rank {rank} on {hosts[rank]} (by {distance:.2g} of their norm)" for rank, distance in self.far.items()
        )
        when = f"at the end of epoch {epoch + 1}" if step is None else f"in epoch {epoch + 1} after step {step + 1}"
        return (
            f"The weights of {named} differ {when} from those of rank {self.usual} on {hosts[self.usual]}, and should "
            "be equal. The usual causes: something sets weights on one rank alone (a callback, a layer), a layer that "
            "is not deterministic was given other settings there, or the memory of a host is bad. Go on from a "
            "checkpoint that was written before, without that host if it happens again."
        )


def compare(marks: Sequence[list[Any]]) -> ReplicaDivergence | None:
    """Compare the results of ``mark`` of all ranks; return None if all are equal, or if none is finite.

    Example:
        >>> usual, other = np.ones(8, np.float32), np.full(8, 2, np.float32)
        >>> compare([mark(usual), mark(usual)]), compare([mark(usual), mark(usual), mark(other)]).far
        (None, {2: 1.0})
    """
    if all(rank_mark[0] == marks[0][0] for rank_mark in marks):
        return None
    counts = Counter(bits for bits, _, _ in marks)
    largest_group = max(counts.values())
    usual = next(rank for rank, (bits, _, _) in enumerate(marks) if counts[bits] == largest_group)
    bits, norm, sums = marks[usual]
    far: dict[int, float] = {}
    near: dict[int, float] = {}
    for rank, (other_bits, _, other_sums) in enumerate(marks):
        if other_bits == bits:
            continue
        distance = float(np.linalg.norm(np.subtract(other_sums, sums)) / max(norm, np.finfo(np.float32).tiny))
        if np.isfinite(sums).all() or np.isfinite(other_sums).all():
            (near if distance <= _FAR else far)[rank] = distance
    return ReplicaDivergence(far, near, usual) if far or near else None


def warn(drift: ReplicaDivergence, consequence: str) -> None:
    """Print a warning on stderr that ranks differ in the last bits.

    Args:
        drift: ReplicaDivergence.
        consequence: str. The consequence, for the message.
    """
    rank, distance = max(drift.near.items(), key=lambda item: item[1])
    logger.warning(
        f"the weights of {counted(len(drift.near), 'rank')} differ from those of rank {drift.usual} in their last bits "
        f"(the most those of rank {rank}, by {distance:.1g} of their norm), as on unlike processors or with unlike "
        f"libraries; {consequence}. This warning appears once."
    )
