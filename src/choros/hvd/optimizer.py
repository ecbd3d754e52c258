"""``DistributedOptimizer``: an optimizer that reduces gradients over the ranks before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from choros.argument_checks import check_number
from choros.backends import inner_optimizer
from choros.comm.collectives import AVERAGE, SUM, Op
from choros.errors import InvalidInputError
from choros.hvd import fit_patch
from choros.hvd.collectives import operation
from choros.hvd.compression import Compression, Compressor
from choros.hvd.context import ProcessSet, context
from choros.hvd.custom_loop import attach
from choros.hvd.gradient_reduction import ReductionConfig
from choros.hvd.unused_arguments import warn_of_one_sum, warn_of_unused


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = AVERAGE,
    num_groups: int = 0,
    groups: object = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet | int | None = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make an optimizer reduce its gradients over all ranks before it applies them; return the same object.

    Class, configuration, learning rate and slots of the optimizer stay, so a saved model loads in plain Keras. ``fit``
    and ``train_on_batch`` run the model's ``train_step`` up to the optimizer, reduce the gradients over the ranks, and
    apply them. ``optimizer.apply`` and ``apply_gradients`` in custom training loops reduce too.

    ``batch_size`` is per rank, as in Horovod. In ``fit`` an average is weighted by the number by which each rank's loss
    divided (its rows). So the average is exact for unequal batches. In custom loops all ranks have the same weight.

    Args:
        optimizer: keras.optimizers.Optimizer, built or not. A ``LossScaleOptimizer`` is accepted; ``fit`` also finds
            the optimizer inside of one that ``compile`` adds.
        name: without effect; the name of the optimizer stays.
        device_dense: without effect. This and the other arguments without effect give one warning, on rank 0.
        device_sparse: without effect.
        compression: ``Compression.none`` (default), ``.fp16`` or ``.bf16``: the type to which gradients are rounded
            before they are added. They are added in float32, so an average cannot overflow.
        sparse_as_dense: bool. Without effect: gradients of embeddings are always added as dense matrices.
        gradient_predivide_factor: float. Splits the division of an average; without effect, as sums are wide.
        op: ``hvd.Average`` (default) or ``hvd.Sum``.
        num_groups: int. Without effect: all gradients are reduced at once.
        groups: int or list of lists of variables. Without effect, for the same reason.
        backward_passes_per_step: int. Steps whose gradients are added up before they are reduced and applied.
            Defaults to 1; ``iterations`` counts every step.
        average_aggregated_gradients: bool. Divide their sum by ``backward_passes_per_step``. Defaults to False.
        process_set: ProcessSet. The ranks that reduce. Defaults to all ranks.
        scale_local_gradients: bool. Divide the gradients of variables given to ``register_local_var`` by the number of
            ranks. Defaults to True.

    Returns:
        The optimizer, with the new method ``register_local_var(variable)``.

    Raises:
        ValueError: before ``init``; another op; a predivide factor with Sum; groups of another type; not an optimizer;
            an optimizer that is distributed already, or that has ``gradient_accumulation_steps`` beside
            ``backward_passes_per_step``.

    Example:
        >>> import keras, choros.hvd as hvd
        >>> hvd.init()
        >>> sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
        >>> type(sgd) is type(keras.optimizers.SGD())
        True
    """
    context()
    kind = operation(op)
    if kind not in (AVERAGE, SUM):
        raise ValueError(
            f"op={kind.name.capitalize()}: an optimizer's gradients are reduced by hvd.Average or hvd.Sum."
        )
    if check_number("gradient_predivide_factor", gradient_predivide_factor, "a finite number above 0") == 0:
        raise InvalidInputError("gradient_predivide_factor=0: give a finite number above 0.")
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise InvalidInputError(f"process_set={process_set!r}: give a hvd.ProcessSet, or None for all ranks.")
    if gradient_predivide_factor != 1.0 and kind != AVERAGE:
        raise ValueError("gradient_predivide_factor has a meaning with op=hvd.Average only.")
    _check_groups(num_groups, groups)
    warn_of_unused("DistributedOptimizer", "the optimizer stays as it is", name=name)
    devices = (device_dense, device_sparse)
    warn_of_one_sum("DistributedOptimizer", devices, sparse_as_dense, gradient_predivide_factor, num_groups, groups)
    every = backward_passes_per_step
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"backward_passes_per_step={every!r}: give a whole number of 1 or more.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidInputError(f"{optimizer!r} is not an optimizer of Keras: give keras.optimizers.SGD(...), say.")
    accumulates = getattr(inner_optimizer(optimizer), "gradient_accumulation_steps", None)
    if every > 1 and accumulates:
        raise ValueError(
            f"backward_passes_per_step={every} and the optimizer's gradient_accumulation_steps={accumulates} both add "
            "up gradients: give one of them (the first exchanges once for all passes)."
        )
    if fit_patch.reduction_of(optimizer) is not None:
        raise ValueError(f"{type(optimizer).__name__} is distributed already: wrap it once.")
    config = ReductionConfig(kind, compression, process_set, every, average_aggregated_gradients, scale_local_gradients)
    attach(optimizer, config)
    fit_patch.install()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: object = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Make an optimizer as ``DistributedOptimizer`` does, but do not reduce the gradients of some layers.

    Args:
        optimizer: as for ``DistributedOptimizer``.
        local_layers: keras.layers.Layer or list of layers, which must be built before the first step.
        scale_local_gradients: bool. Divide their gradients by the number of ranks. Defaults to True.
        **options: further arguments of ``DistributedOptimizer``.

    Raises:
        ValueError: as ``DistributedOptimizer`` does, or ``local_layers`` holds something else.
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, Sequence) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers holds {layer!r}: give layers of Keras.")
    distributed = DistributedOptimizer(optimizer, scale_local_gradients=scale_local_gradients, **options)
    fit_patch.reduction_of(distributed).local_layers = layers
    return distributed


def _check_groups(num_groups: int, groups: object) -> None:
    for option, value in (("num_groups", num_groups), ("groups", groups)):
        lists = isinstance(value, list | tuple) and all(isinstance(group, list | tuple) for group in value)
        if value and not lists and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{option}={value!r}: give a whole number above 0, or a list of lists of variables.")
    if num_groups and groups:
        raise ValueError("num_groups and groups are both given: give groups alone.")
