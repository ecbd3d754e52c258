"""The model replica of a worker on JAX, PyTorch and TensorFlow. Each framework is imported at its first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from choros.backend_choice import BACKENDS
from choros.backends.replica import Replica
from choros.errors import InvalidInputError

if TYPE_CHECKING:
    import keras

__all__ = [
    "Replica",
    "averages_of",
    "backend_name",
    "forget",
    "inner_optimizer",
    "make_replica",
    "step_counter",
]


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside one that scales the loss; any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", None) or optimizer


def step_counter(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the variable that counts an optimizer's steps, including steps that only accumulate gradients."""
    return inner_optimizer(optimizer)._iterations


def backend_name() -> str:
    """Return the backend that Keras runs on.

    Raises:
        InvalidInputError: Keras was imported with a backend that Choros does not train on, such as numpy.

    Example:
        >>> backend_name() in BACKENDS
        True
    """
    import keras

    name = str(keras.backend.backend())
    if name not in BACKENDS:
        raise InvalidInputError(
            f"Keras was imported with the backend {name!r}, on which Choros does not train: start a new process, and "
            "set KERAS_BACKEND to 'jax', 'torch' or 'tensorflow' before Keras is imported."
        )
    return name


def averages_of(optimizer: keras.optimizers.Optimizer) -> dict[int, Any]:
    """Return an optimizer's moving averages of its variables (``use_ema``), keyed by the ``id`` of each variable.

    Args:
        optimizer: a built optimizer. With loss scaling, the averages of the inner optimizer are returned.

    Returns:
        A dict, empty if the optimizer keeps no averages.
    """
    inner = inner_optimizer(optimizer)
    if not getattr(inner, "use_ema", False):
        return {}
    pairs = zip(inner._trainable_variables, inner._model_variables_moving_average, strict=True)
    return {id(variable): average for variable, average in pairs if average is not None}


def make_replica(
    model: keras.Model,
    workers: int = 1,
    devices: Sequence[str] = (),
    layout: keras.distribution.ModelParallel | None = None,
) -> Replica:
    """Return the replica of a compiled model for the backend that Keras runs on.

    Args:
        model: a compiled ``keras.Model``.
        workers: number of workers that train. With more than one, losses that cannot be exact are refused.
        devices: on JAX, the devices among which the rows of each batch are divided. Defaults to Keras' device.
        layout: on JAX, the ``keras.distribution.ModelParallel`` under which the model was created.

    Returns:
        The replica. Call its ``build`` with a first batch before any other method.

    Raises:
        InvalidInputError: the model is not compiled, or Keras runs on a backend that Choros does not support.
    """
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise InvalidInputError("The model is not compiled: call model.compile(optimizer, loss) first.")
    name = backend_name()
    if name == "jax":
        from choros.backends.devices.jax import MeshSharding
        from choros.backends.jax import JaxReplica

        spread = MeshSharding.by(layout) if layout is not None else MeshSharding.over(devices) if devices else None
        return JaxReplica(model, workers, spread)
    if name == "torch":
        from choros.backends.torch import TorchReplica

        return TorchReplica(model, workers)
    from choros.backends.tensorflow import TensorFlowReplica

    return TensorFlowReplica(model, workers)


def forget() -> None:
    """Free all compiled programs of JAX, about 5 MB for each model.

    Call this only in a process that Choros started: JAX compiles every program again at its next use.
    """
    import keras

    if keras.backend.backend() == "jax":
        from choros.backends.jax import clear

        clear()
