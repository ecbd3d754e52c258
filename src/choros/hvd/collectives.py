"""Horovod's collectives on arrays and tensors of any library; the input is never changed.

Collectives on floating-point tensors are differentiable, also inside ``jax.jit`` and ``tf.function``. The gradient is
that of the sum of all ranks' losses, so computing it is a collective too: all ranks must take part.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from choros.comm.collectives import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Collectives, Op
from choros.consistency.model_fingerprint import alike
from choros.errors import InvalidInputError, RankMismatchError, brief
from choros.hvd.compression import Compression, Compressor, checked, warn_of_bytes
from choros.hvd.context import collectives
from choros.hvd.host_ops import grad_name, no_second, operate
from choros.hvd.tensor_conversion import arrive
from choros.hvd.unused_arguments import ONE_SUM, warn_of_unused
from choros.types import Array

if TYPE_CHECKING:
    from choros.hvd.context import ProcessSet
    from choros.types import Tensor

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def reports_failure(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a collective: if it fails before its first exchange, report that to all ranks, so that none waits."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        negotiations_before = Collectives.negotiations
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (
                Collectives.negotiations == negotiations_before
                and (calls := _collectives_of(function, args, kwargs)) is not None
            ):
                with contextlib.suppress(RankMismatchError):
                    calls.refuse(function.__name__, brief(error))
            raise

    return call


def _collectives_of(function: Callable[..., Any], args: Any, kwargs: Any) -> Collectives | None:
    """Return the collectives of a call's process set; None if the set is not valid or has one rank only."""
    arguments = {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
    with contextlib.suppress(TypeError, ValueError):
        calls = collectives(arguments.get("process_set"))
        return calls if calls.size > 1 else None
    return None


def operation(op: Any = None, average: Any = None) -> Op:
    """Return the reduction given by ``op`` or by Horovod's old ``average``; ``Average`` if both are None.

    Raises:
        ValueError: both are given, or ``op`` is not a reduction.
    """
    if op is not None and average is not None:
        raise ValueError("op and average are both given: give op=hvd.Average or op=hvd.Sum alone.")
    if average is not None:
        return Average if average else Sum
    try:
        if isinstance(op, bool):  # Op(True) would be Sum
            raise ValueError
        return Average if op is None else Op(op)
    except ValueError:
        raise ValueError(f"op={op!r}: give hvd.Average, Sum, Min, Max, Product or Adasum.") from None


@reports_failure
def allreduce(
    value: Tensor,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Compressor = Compression.none,
    process_set: ProcessSet | int | None = None,
    device_dense: str = "",
    device_sparse: str = "",
) -> Tensor:
    """Return the reduction of all ranks' values, in the library and type of ``value``.

    An integer sum that does not fit the dtype wraps around. An average of integers is summed in 64 bits and truncated
    towards 0. Sparse gradients of TensorFlow (``IndexedSlices``) are summed or averaged by gathering values and
    indices.

    Args:
        value: array or tensor of the same type and shape on every rank.
        name: str. The name of the call in errors; the same on all ranks.
        average: bool. Horovod's old form of Average (True) or Sum (False).
        prescale_factor: float. Factor before the reduction. Defaults to 1.
        postscale_factor: float. Factor after the reduction. Defaults to 1.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: ``Compression.none`` (default), ``.fp16`` or ``.bf16``: the type to which the value is rounded. No
            bytes are saved.
        process_set: ProcessSet. Defaults to all ranks.
        device_dense: without effect, with a warning.
        device_sparse: likewise.

    Raises:
        ValueError: before ``init``, or both ``op`` and ``average`` are given.
        RankMismatchError: the ranks' calls differ. It is raised on every rank; later calls still work.

    Example:
        >>> import choros.hvd as hvd
        >>> hvd.init()
        >>> hvd.allreduce([1.0, 2.0], op=hvd.Sum).tolist()
        [1.0, 2.0]
    """
    warn_of_unused("allreduce", ONE_SUM, device_dense=device_dense, device_sparse=device_sparse)
    kind, calls, compression = operation(op, average), collectives(process_set), checked(compression)
    warn_of_bytes(compression, calls.rank, calls.size)
    if all(hasattr(value, part) for part in ("values", "indices", "dense_shape")):
        if kind not in (AVERAGE, SUM):
            raise InvalidInputError(
                f"Sparse values have no {kind.name.capitalize()}, as most rows are absent: take Average or Sum."
            )
        name = name or "sparse"
        factor = prescale_factor * postscale_factor / (calls.size if kind == AVERAGE else 1)
        sparse: Any = value
        rows, back = arrive(sparse.values, name)
        indices, back_indices = arrive(sparse.indices, name)
        gathered = calls.allgather(np.asarray(rows * rows.dtype.type(factor)), name=f"{name}.values")
        return type(value)(
            back(gathered), back_indices(calls.allgather(indices, name=f"{name}.indices")), sparse.dense_shape
        )

    def host(x: Array) -> Array:
        small, context = compression.compress(np.asarray(x))
        out = calls.allreduce(small, kind, name=name, prescale=prescale_factor, postscale=postscale_factor)
        return compression.decompress(out, context)

    def gradient(grad: Tensor) -> Tensor:
        if kind not in (AVERAGE, SUM):
            raise InvalidInputError(f"allreduce by {kind.name.capitalize()} has no gradient here: take Average or Sum.")
        factors = prescale_factor, postscale_factor
        return allreduce(
            grad, grad_name(name), None, *factors, op=kind, compression=compression, process_set=process_set
        )

    return operate(value, host, gradient, lambda shape: shape, name)


@reports_failure
def grouped_allreduce(values: Sequence[Any], name: str | None = None, **options: Any) -> list[Any]:
    """Return ``allreduce`` of each value; ``options`` holds further arguments of ``allreduce``."""
    values = list(values)
    names = _value_names(collectives(options.get("process_set")), name, values)
    return [allreduce(value, value_name, **options) for value, value_name in zip(values, names, strict=True)]


@reports_failure
def allgather(value: Tensor, name: str | None = None, process_set: ProcessSet | int | None = None) -> Tensor:
    """Return all ranks' rows in rank order; the first dimension may differ between ranks, and may be 0.

    Inside ``jax.jit`` shapes are fixed, so the ranks exchange their row counts while they trace. A rank must then have
    the same number of rows in every call of the compiled function.

    Args:
        value: array or tensor of shape (rows, ...); dtype and other dimensions are the same on every rank.
        name: str. The name of the call in errors; the same on all ranks.
        process_set: ProcessSet. Defaults to all ranks.

    Raises:
        ValueError: before ``init``.
        RankMismatchError: on every rank, if the calls differ.
    """
    calls = collectives(process_set)
    local_rows = [slice(0)]

    def host(x: Array) -> Array:
        rows = len(x) if x.ndim else 0
        out, counts = calls.allgather_counted(x, name=name)
        begin = sum(counts[: calls.rank])
        local_rows[0] = slice(begin, begin + rows)
        return out

    def shape(dims: tuple[Any, ...]) -> tuple[Any, ...]:
        if type(value).__module__.startswith("tensorflow"):
            return (None, *dims[1:])
        return (sum(calls.allgather_object(dims[0], name=f"rows of {name}")), *dims[1:])  # while all ranks trace

    def gradient(grad: Tensor) -> Tensor:
        def summed(x: Array) -> Array:
            return calls.allreduce(x, SUM, name=grad_name(name))[local_rows[0]].copy()

        return operate(grad, summed, no_second, lambda _: tuple(value.shape), name)

    return operate(value, host, gradient, shape, name)


@reports_failure
def grouped_allgather(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet | int | None = None
) -> list[Any]:
    """Return ``allgather`` of each value."""
    values = list(values)
    names = _value_names(collectives(process_set), name, values)
    return [allgather(value, value_name, process_set) for value, value_name in zip(values, names, strict=True)]


@reports_failure
def broadcast(
    value: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | int | None = None
) -> Tensor:
    """Return the root's value.

    Args:
        value: array or tensor; the root's dtype and shape on every rank.
        root_rank: int. A rank of the whole job, also with a process set.
        name: str. The name of the call in errors; the same on all ranks.
        process_set: ProcessSet. Defaults to all ranks.

    Raises:
        ValueError: before ``init``.
        RankMismatchError: on every rank, if the calls differ or the root is not in the process set.
    """
    calls = collectives(process_set)

    def gradient(grad: Tensor) -> Tensor:
        def at_root(x: Array) -> Array:
            total = calls.allreduce(x, SUM, name=grad_name(name))
            return total if calls.ranks[calls.rank] == root_rank else np.zeros_like(total)

        return operate(grad, at_root, no_second, lambda shape: shape, name)

    return operate(value, lambda x: calls.broadcast(x, root_rank, name=name), gradient, lambda shape: shape, name)


@reports_failure
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet | int | None = None, inplace: bool = False
) -> None:
    """Set variables of Keras, or any objects with an ``assign`` method, to the root's values.

    Args:
        variables: the same variables in the same order on every rank.
        root_rank: int. A rank of the whole job.
        process_set: ProcessSet. Defaults to all ranks.
        inplace: without effect; variables are always set in place.
    """
    take(collectives(process_set), variables, root_rank)


def take(calls: Collectives, variables: Sequence[Any], root: int | None = None) -> None:
    """Set variables to the root's values, as ``broadcast_variables`` does, among the ranks of ``calls``."""
    variables = list(variables)
    for variable, place in zip(variables, _value_names(calls, "variable", variables), strict=True):
        x, back = arrive(variable)
        path = str(getattr(variable, "path", getattr(variable, "name", "")))
        # A model built from its first batch has the model's name in the path; one loaded from a file has not.
        label = f"{place} {alike('/'.join(path.split('/')[-2:]))}".rstrip()
        out = calls.broadcast(x, root, name=label)
        assign = getattr(variable, "assign", None)
        if assign is None:
            raise InvalidInputError(f"Variable {label} is of type {type(variable).__name__}, which cannot be assigned.")
        assign(back(out))


@reports_failure
def reducescatter(
    value: Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction; if rows do not divide evenly, the first ranks get one more.

    Args:
        value: array or tensor of shape (rows, ...), with the same dtype and shape on every rank.
        name: str. The name of the call in errors; the same on all ranks.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        process_set: ProcessSet. Defaults to all ranks.
        prescale_factor: float. Factor before the reduction. Defaults to 1.
        postscale_factor: float. Factor after the reduction. Defaults to 1.

    Raises:
        ValueError: before ``init``.
        RankMismatchError: on every rank, if the calls differ or a value has no rows dimension.
    """
    calls, kind = collectives(process_set), operation(op)
    factor = prescale_factor * postscale_factor / (calls.size if kind == AVERAGE else 1)

    def host(x: Array) -> Array:
        return calls.reducescatter(x, kind, name=name, prescale=prescale_factor, postscale=postscale_factor)

    def gradient(grad: Tensor) -> Tensor:
        if kind not in (AVERAGE, SUM):
            raise InvalidInputError(
                f"reducescatter by {kind.name.capitalize()} has no gradient here: take Average or Sum."
            )

        def gathered(x: Array) -> Array:
            return np.asarray(calls.allgather(x, name=grad_name(name)) * x.dtype.type(factor))

        return operate(grad, gathered, no_second, lambda _: tuple(value.shape), name)

    def shape(dims: tuple[Any, ...]) -> tuple[Any, ...]:
        if dims[0] is None:
            return dims
        rows_each, remainder = divmod(dims[0], calls.size)
        return (rows_each + (calls.rank < remainder), *dims[1:])

    return operate(value, host, gradient, shape, name)


@reports_failure
def grouped_reducescatter(values: Sequence[Any], name: str | None = None, **options: Any) -> list[Any]:
    """Return ``reducescatter`` of each value; ``options`` holds further arguments of ``reducescatter``."""
    values = list(values)
    names = _value_names(collectives(options.get("process_set")), name, values)
    return [reducescatter(value, value_name, **options) for value, value_name in zip(values, names, strict=True)]


@reports_failure
def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | int | None = None
) -> Any:
    """Return the root's object: numbers, text, bytes, lists, tuples, sets, dicts and arrays, without pickle.

    Raises:
        RankMismatchError: on every rank, if the root's object holds another type, which the error names.
    """
    return collectives(process_set).broadcast_object(obj, root_rank, name=name)


@reports_failure
def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet | int | None = None) -> list[Any]:
    """Return a list of all ranks' objects in rank order; see ``broadcast_object`` for types and errors."""
    return collectives(process_set).allgather_object(obj, name=name)


def barrier(process_set: ProcessSet | int | None = None) -> None:
    """Wait until all ranks have called it."""
    collectives(process_set).barrier()


def join() -> int:
    """Report that this rank has no more data; it contributes zeros to collectives until all ranks have joined.

    An average still divides by the number of all ranks, as in Horovod. An average of gradients, in a loop with
    ``DistributedOptimizer`` or a tape, divides by the number of ranks that gave gradients. ``fit`` does not need
    ``join``: give every rank the same number of batches (``hvd.shard``).

    Returns:
        The rank that joined last.
    """
    return collectives().join()


def _value_names(calls: Collectives, name: str | None, values: Sequence[Any]) -> list[str]:
    """Return names for a list's values, with their number, so that lists of unequal length fail at the first call."""
    if not values:
        calls.barrier()  # a rank with values makes another call, so both ranks raise
    return [f"{name or 'group'}.{number} of {len(values)}" for number in range(len(values))]
