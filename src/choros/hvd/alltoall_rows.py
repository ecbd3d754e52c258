"""Horovod's ``alltoall``: each rank sends rows to each other rank, eagerly and in compiled functions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.comm.collectives import Collectives
from choros.errors import InvalidInputError
from choros.hvd.collectives import reports_failure
from choros.hvd.context import collectives
from choros.hvd.host_ops import Shape, grad_name, no_second, operate
from choros.hvd.tensor_conversion import arrive, is_symbolic
from choros.types import Array

if TYPE_CHECKING:
    from choros.hvd.context import ProcessSet
    from choros.types import Tensor


@reports_failure
def alltoall(
    value: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | int | None = None,
) -> Any:
    """Send ``splits[r]`` rows to each rank r; differentiable, also inside ``jax.jit`` and ``tf.function``.

    Inside ``jax.jit`` the ranks exchange their splits while they trace, so ``splits`` must have concrete values there.

    Args:
        value: array or tensor; its rows are in the order of the ranks that receive them.
        splits: (size,) integers. Defaults to equal parts.
        name: str. The name of the call in errors.
        process_set: ProcessSet. Defaults to all ranks.

    Returns:
        The rows received; if ``splits`` is given, also the number of rows from each rank.

    Raises:
        InvalidInputError: inside ``jax.jit``, splits without values, or not one for each rank.
        RankMismatchError: on every rank, if the calls differ or the splits do not fit the rows.

    Example:
        >>> import choros.hvd as hvd
        >>> hvd.init()
        >>> hvd.alltoall([1.0, 2.0], splits=[2])[0].tolist()
        [1.0, 2.0]
    """
    calls = collectives(process_set)
    function = _eager
    if is_symbolic(value):
        function = _in_graph if type(value).__module__.startswith("tensorflow") else _traced
    return function(calls, value, splits, name)


def _eager(calls: Collectives, value: Tensor, splits: Tensor | Sequence[int] | None, name: str | None) -> Any:
    parts, back = (None, None) if splits is None else arrive(splits, "splits")
    received: list[Array] = []
    rows = _send(calls, value, [parts], received, lambda dims: dims, name)
    return rows if back is None else (rows, back(received[0]))


def _in_graph(calls: Collectives, value: Tensor, splits: Tensor | Sequence[int] | None, name: str | None) -> Any:
    """Send in a TensorFlow graph: the splits are a tensor too, exchanged by an ``alltoall`` before the rows."""
    parts: list[Any] = [None]
    counts = None
    if splits is not None:
        tensorflow = sys.modules["tensorflow"]

        def exchange_splits(local_splits: Array) -> Array:
            parts[:] = [local_splits]
            return calls.alltoall(local_splits, None, name=f"splits of {name}")[0]

        split_sizes = tensorflow.identity(tensorflow.cast(splits, tensorflow.int32))
        counts = operate(split_sizes, exchange_splits, no_second, lambda dims: dims, name)
    rows = _send(calls, value, parts, [], lambda dims: (None, *dims[1:]), name)
    return rows if counts is None else (rows, counts)


def _traced(calls: Collectives, value: Tensor, splits: Tensor | Sequence[int] | None, name: str | None) -> Any:
    """Send inside ``jax.jit``: the ranks exchange their row counts while all trace, because shapes are fixed then."""
    lengths: tuple[int, ...] = getattr(value, "shape", ())  # a traced array has one
    even_splits = [lengths[0] // calls.size if lengths else 0] * calls.size
    if splits is not None:
        even_splits = arrive(splits, "splits")[0].tolist()
    known = calls.allgather_object(even_splits, name=f"splits of {name}")
    if any(len(sent) != calls.size for sent in known):
        raise InvalidInputError(
            f"alltoall{' ' + name if name else ''}: splits={even_splits}: give {calls.size} whole numbers, one a rank."
        )
    counts = [sent[calls.rank] for sent in known]
    rows = _send(calls, value, [np.array(even_splits)], [], lambda dims: (sum(counts), *dims[1:]), name)
    return rows if splits is None else (rows, sys.modules["jax"].numpy.asarray(counts, "int32"))


def _send(
    calls: Collectives,
    value: Tensor,
    splits: list[Any],
    received: list[Array],
    shape: Shape,
    name: str | None,
) -> Tensor:
    """Send the rows by ``splits[0]``, read at the time of sending; put the counts from each rank into ``received``."""

    def host(x: Array) -> Array:
        rows, counts = calls.alltoall(x, splits[0], name=name)
        received[:] = [counts]
        return rows

    def gradient(grad: Tensor) -> Tensor:
        def sent_back(x: Array) -> Array:
            return calls.alltoall(x, received[0], name=grad_name(name))[0]

        return operate(grad, sent_back, no_second, lambda _: tuple(value.shape), name)

    return operate(value, host, gradient, shape, name)
