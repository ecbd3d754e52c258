"""Reductions over ranks: sum, average, minimum, maximum, product, Adasum, in a type that is wide enough."""

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
    """Reduction operations, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = Op
_PAIRWISE: dict[Op, Callable[[Array, Array], Array]] = {MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}


def refusal(op: Op, dtype: np.dtype, size: int) -> str:
    """Return the reason why values of a dtype cannot be reduced by ``op``, or ``""``.

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


class SumGroup(Protocol):
    """Part of a group that ``reduced`` needs."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The receiver of timings, or None."""
        ...

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks."""
        ...

    def gather(self, x: bytes) -> list[bytes]:
        """Return every rank's bytes."""
        ...


def reduced(group: SumGroup, x: Array, op: Op, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """Reduce the arrays of all ranks; return a new array with the dtype and shape of ``x``, bit-equal on every rank.

    Half precision is summed in float32 and rounded once. An average of integers is summed in 64 bits, so large values
    do not overflow. Integers are scaled in float64 and truncated towards zero, as in Horovod.

    Args:
        group: all ranks that take part.
        x: array of any shape.
        op: Op.
        prescale: float. Factor before the reduction. Defaults to 1.
        postscale: float. Factor after the reduction. Defaults to 1.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> reduced(SingleRankGroup(), np.array([1, 3, 5]), SUM, prescale=0.5).tolist()
        [0, 1, 2]
    """
    dtype = x.dtype
    if op == AVERAGE:
        op, postscale = SUM, postscale / group.size
        x = x.astype(np.int64) if dtype.kind in "iu" and dtype.itemsize < 8 else x
    is_half_precision = dtype.itemsize == 2 and name_of(dtype) in ("float16", "bfloat16")
    work = x.astype(np.float32) if is_half_precision else x.astype(np.uint8) if dtype.kind == "b" else x
    work = _scaled(work, prescale)
    if op == SUM and dtype.kind != "b":
        total = group.sum(work)
    else:
        parts = _gather_arrays(group, work if op != ADASUM else work.astype(np.float64))
        begin = time.monotonic_ns()
        if op == ADASUM:
            total = _adasum_tree(parts).astype(work.dtype)
        else:
            total = functools.reduce(_PAIRWISE[MAX if op == SUM else op], parts)
        if group.trace is not None:
            group.trace(("reduce", "reduce", begin, time.monotonic_ns(), work.nbytes))
    with np.errstate(over="ignore"):
        return np.asarray(_scaled(total, postscale)).astype(dtype)


def _gather_arrays(group: SumGroup, x: Array) -> list[Array]:
    return [np.frombuffer(part, x.dtype).reshape(x.shape) for part in group.gather(np.ascontiguousarray(x).tobytes())]


def _scaled(x: Array, factor: float) -> Array:
    if factor == 1.0:
        return x
    if x.dtype.kind in "iu":
        return np.trunc(x.astype(np.float64) * factor).astype(x.dtype)
    return np.asarray(x * x.dtype.type(factor))


def _adasum_tree(vectors: list[Array]) -> Array:
    """Return Adasum of the vectors, pair by pair.

    Maleki et al. 2021 (Scaling Distributed Training with Adaptive Summation, MLSys), equation 3.
    """
    while len(vectors) > 1:
        vectors = [_adasum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _adasum(a: Array, b: Array) -> Array:
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return np.asarray((1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b)
