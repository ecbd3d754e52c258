"""Reductions over the ranks: sum, average, extremes, product, Adasum, in a type that is wide enough."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from choros.comm.collectives.object_codec import name_of
from choros.comm.group import Trace
from choros.types import Array


class Op(enum.IntEnum):
    """The reductions, by Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = Op
_PAIRS: dict[Op, Callable[[Array, Array], Array]] = {MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}


def refusal(op: Op, dtype: np.dtype, size: int) -> str:
    """Say why values of a type cannot be reduced so, or ``""``.

    Example:
        >>> refusal(ADASUM, np.dtype("float32"), 3)
        'Adasum needs a power of 2 of ranks, not 3'
    """
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        return f"values of {dtype} cannot be reduced"
    if op == ADASUM and size & (size - 1):
        return f"Adasum needs a power of 2 of ranks, not {size}"
    if op == ADASUM and dtype.kind != "f" and dtype.name != "bfloat16":
        return f"Adasum needs values of floating point, not {dtype}"
    if op == AVERAGE and dtype.kind == "b":
        return "bool has no average: take Sum (any), Product (all), or cast it"
    if op in (MIN, MAX) and dtype.kind == "c":
        return "complex values have no order"
    return ""


class Summing(Protocol):
    """The part of a group that ``reduced`` needs."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The receiver of timings."""
        ...

    def sum(self, x: Array) -> Array:
        """The sum over ranks."""
        ...

    def gather(self, x: bytes) -> list[bytes]:
        """Every rank's bytes."""
        ...


def reduced(group: Summing, x: Array, op: Op, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """Reduce the arrays of all ranks; every rank gets the same bits in a new array of ``x``'s type and shape.

    Half precision is summed in float32 and rounded once, and whole numbers that are averaged in 64 bits, so an average
    of large values does not overflow. Whole numbers are scaled in float64 and cut towards zero, as Horovod does.

    Args:
        group: everyone that takes part.
        x: any shape.
        op: what to do with them.
        prescale: factor before.
        postscale: factor after.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> reduced(SingleRankGroup(), np.array([1, 3, 5]), SUM, prescale=0.5).tolist()
        [0, 1, 2]
    """
    kind = x.dtype
    if op == AVERAGE:
        op, postscale = SUM, postscale / group.size
        x = x.astype(np.int64) if kind.kind in "iu" and kind.itemsize < 8 else x
    narrow = kind.itemsize == 2 and name_of(kind) in ("float16", "bfloat16")
    work = x.astype(np.float32) if narrow else x.astype(np.uint8) if kind.kind == "b" else x
    work = _scaled(work, prescale)
    if op == SUM and kind.kind != "b":
        total = group.sum(work)
    else:
        parts = _all(group, work if op != ADASUM else work.astype(np.float64))
        begin = time.monotonic_ns()
        if op == ADASUM:
            total = _tree(parts).astype(work.dtype)
        else:
            total = functools.reduce(_PAIRS[MAX if op == SUM else op], parts)
        if group.trace is not None:
            group.trace(("reduce", "reduce", begin, time.monotonic_ns(), work.nbytes))
    with np.errstate(over="ignore"):
        return np.asarray(_scaled(total, postscale)).astype(kind)


def _all(group: Summing, x: Array) -> list[Array]:
    return [np.frombuffer(part, x.dtype).reshape(x.shape) for part in group.gather(np.ascontiguousarray(x).tobytes())]


def _scaled(x: Array, factor: float) -> Array:
    if factor == 1.0:
        return x
    if x.dtype.kind in "iu":
        return np.trunc(x.astype(np.float64) * factor).astype(x.dtype)
    return np.asarray(x * x.dtype.type(factor))


def _tree(vectors: list[Array]) -> Array:
    """Maleki et al. 2021 (Scaling Distributed Training with Adaptive Summation, MLSys), equation 3, pair by pair."""
    while len(vectors) > 1:
        vectors = [_adasum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _adasum(a: Array, b: Array) -> Array:
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return np.asarray((1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b)
