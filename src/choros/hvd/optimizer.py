"""``DistributedOptimizer``: the same optimizer, whose gradients are first reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from choros.comm.collectives import AVERAGE, SUM, Op
from choros.errors import InvalidInputError
from choros.hvd import fit_patch
from choros.hvd.collectives import operation
from choros.hvd.compression import Compression, Compressor
from choros.hvd.context import context
from choros.hvd.custom_loop import attach
from choros.hvd.gradient_reduction import ReductionConfig


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = AVERAGE,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks before it applies them; return the same object.

    Nothing else of it changes: class, configuration, learning rate and slots stay, so what is saved loads in plain
    Keras. ``fit`` and ``train_on_batch`` take the model's own ``train_step`` up to the optimizer, meet the other ranks
    in shared memory, and apply; ``optimizer.apply`` and ``apply_gradients`` in loops of your own reduce too.

    ``batch_size`` is per rank, as in Horovod. In ``fit`` an average is weighted by what each rank's loss divided by
    (its rows), so that it is exact where batches are unequal; in loops of your own every rank counts alike.

    Args:
        optimizer: keras.optimizers.Optimizer, built or not. Also a ``LossScaleOptimizer``; one that ``compile`` puts
            around it is known in ``fit``.
        name: ignored; the optimizer keeps its own.
        device_dense: ignored.
        device_sparse: ignored.
        compression: ``Compression.none`` (default), ``.fp16`` or ``.bf16``: what gradients are rounded to before they
            are added. They are added in float32: an average cannot overflow.
        sparse_as_dense: bool. Gradients of embeddings are always added as whole matrices.
        gradient_predivide_factor: float. Splits the division of an average; without effect, as sums are wide.
        op: ``hvd.Average`` (default) or ``hvd.Sum``.
        num_groups: int. Without effect: all gradients are reduced at once.
        groups: int or list of lists of variables. Without effect, likewise.
        backward_passes_per_step: int. Steps whose gradients are added up before they are reduced and applied.
            Defaults to 1; ``iterations`` counts every step.
        average_aggregated_gradients: bool. Divide their sum by that number. Defaults to False.
        process_set: ProcessSet. Who reduces. Defaults to all ranks.
        scale_local_gradients: bool. Divide the gradients of variables given to ``register_local_var`` by the number of
            ranks. Defaults to True.

    Returns:
        The optimizer, which has ``register_local_var(variable)`` now.

    Raises:
        ValueError: before ``init``; another op; a predivide factor with Sum; groups of another kind; no optimizer, one
            that is distributed already, or one with ``gradient_accumulation_steps`` beside
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
    if gradient_predivide_factor != 1.0 and kind != AVERAGE:
        raise ValueError("gradient_predivide_factor has a meaning with op=hvd.Average only.")
    _check_groups(num_groups, groups)
    every = backward_passes_per_step
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"backward_passes_per_step={every!r}: give a whole number of 1 or more.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidInputError(f"{optimizer!r} is no optimizer of Keras: give keras.optimizers.SGD(...), say.")
    accumulates = getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None)
    if every > 1 and accumulates:
        raise ValueError(
            f"backward_passes_per_step={every} and the optimizer's gradient_accumulation_steps={accumulates} both add "
            "up gradients: give one of them (the first exchanges once for all passes)."
        )
    if fit_patch.reduction_of(optimizer) is not None:
        raise ValueError(f"{type(optimizer).__name__} is distributed already: wrap it once.")
    how = ReductionConfig(kind, compression, process_set, every, average_aggregated_gradients, scale_local_gradients)
    attach(optimizer, how)
    fit_patch.install()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any, *, local_layers: Any = None, scale_local_gradients: bool = True, **how: Any
) -> Any:
    """As ``DistributedOptimizer``, but the gradients of some layers stay on their rank.

    Args:
        optimizer: as there.
        local_layers: keras.layers.Layer or list of them, built by the time of the first step.
        scale_local_gradients: bool. Divide their gradients by the number of ranks, as an average over all would be.
            Defaults to True.
        **how: as there.

    Raises:
        ValueError: as there, or what is no layer.
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, Sequence) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers holds {layer!r}: give layers of Keras.")
    made = DistributedOptimizer(optimizer, scale_local_gradients=scale_local_gradients, **how)
    fit_patch.reduction_of(made).local_layers = layers
    return made


def _check_groups(num_groups: int, groups: Any) -> None:
    for what, given in (("num_groups", num_groups), ("groups", groups)):
        lists = isinstance(given, list | tuple) and all(isinstance(one, list | tuple) for one in given)
        if given and not lists and not (isinstance(given, int) and given > 0):
            raise ValueError(f"{what}={given!r}: give a whole number above 0, or a list of lists of variables.")
    if num_groups and groups:
        raise ValueError("num_groups and groups are both given: give groups alone.")
