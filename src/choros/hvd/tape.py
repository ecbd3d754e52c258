"""Horovod's gradient tape for TensorFlow, which reduces gradients over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from choros.comm.collectives import AVERAGE, Op
from choros.errors import InvalidInputError
from choros.hvd.collectives import operation
from choros.hvd.compression import Compression, Compressor
from choros.hvd.context import context
from choros.hvd.custom_loop import EagerGradientReducer
from choros.hvd.gradient_reduction import ReductionConfig
from choros.hvd.unused_arguments import warn_of_one_sum

if TYPE_CHECKING:
    from choros.hvd.context import ProcessSet


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet | int | None = None,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
) -> Any:
    """Return a tape whose ``gradient`` is reduced over all ranks; TensorFlow only, eager and in ``tf.function``.

    Args:
        gradtape: tf.GradientTape.
        device_dense: without effect. This and the other arguments without effect give one warning, on rank 0.
        device_sparse: without effect.
        compression: see ``DistributedOptimizer``.
        sparse_as_dense: likewise.
        op: likewise.
        gradient_predivide_factor: likewise.
        num_groups: likewise.
        groups: likewise.
        process_set: likewise.
        scale_local_gradients: likewise, for ``register_local_source(variable)``.
        local_layers: layers whose gradients are not reduced.

    Raises:
        InvalidInputError: Keras runs on another backend.
    """
    context()
    if keras.backend.backend() != "tensorflow":
        raise InvalidInputError(
            f"DistributedGradientTape is for TensorFlow, and Keras runs on {keras.backend.backend()!r}: wrap the "
            "optimizer in hvd.DistributedOptimizer, whose apply and stateless_apply reduce."
        )
    from choros.hvd.host_ops.tensorflow import reducing

    devices = (device_dense, device_sparse)
    warn_of_one_sum("DistributedGradientTape", devices, sparse_as_dense, gradient_predivide_factor, num_groups, groups)

    config = ReductionConfig(operation(op), compression, process_set, scale_local=scale_local_gradients)
    config.local_layers = [] if local_layers is None else list(local_layers)
    loop = EagerGradientReducer(config, "a tape")

    def reduce(grads: list[Any], sources: list[Any]) -> list[Any]:
        return grads if config.idle else loop.reduce(grads, sources)[1]

    return reducing(gradtape, reduce, config.local)


def PartialDistributedGradientTape(gradtape: object, *, local_layers: object = None, **options: Any) -> Any:
    """Return a ``DistributedGradientTape`` that does not reduce the gradients of ``local_layers``, one or a list."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple) else [layers]
    return DistributedGradientTape(gradtape, local_layers=layers, **options)
