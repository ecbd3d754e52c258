"""Host functions as differentiable operations on tensors of any library, also inside compiled functions.

Eager tensors are copied to the host and back. Inside ``jax.jit`` and ``tf.function`` (without XLA) the compiled program
calls back to the host. The gradient is a collective too, so all ranks must compute it. Each library has one module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from choros.errors import InvalidInputError
from choros.hvd.tensor_conversion import arrive, is_symbolic
from choros.types import Array

if TYPE_CHECKING:
    from choros.types import Tensor

Host = Callable[[Array], Array]
Gradient = Callable[[Any], Any]
Shape = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def operate(value: Tensor, host: Host, gradient: Gradient, shape: Shape, name: str | None = None) -> Tensor:
    """Return ``host(value)`` in the library of ``value``.

    Args:
        value: a value that ``arrive`` takes, or a tensor without values yet.
        host: function from numpy array to numpy array.
        gradient: function from the gradient of the result to that of ``value``, on tensors of the library.
        shape: function from the shape of ``value`` to that of the result, for compiled functions.
        name: the name of the value in errors.
    """
    if type(value).__module__.partition(".")[0] == "keras":
        value = getattr(value, "value", value)

    def forward(tensor: Tensor) -> Tensor:
        array, back = arrive(tensor, name)
        return back(host(array))

    # ``sys.modules`` gives modules without types, so a type checker does not see what the conditions below exclude.
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(value, torch.Tensor):
        from choros.hvd.host_ops import torch as on_torch

        return on_torch.operate(value, forward, gradient)  # pyright: ignore[reportArgumentType]
    if tensorflow is not None and isinstance(value, tensorflow.Tensor | tensorflow.Variable):
        from choros.hvd.host_ops import tensorflow as on_tensorflow

        return on_tensorflow.operate(value, forward, host, gradient, shape)  # pyright: ignore[reportArgumentType]
    if is_symbolic(value):
        from choros.hvd.host_ops import jax as on_jax

        return on_jax.operate(value, host, gradient, shape)  # pyright: ignore[reportArgumentType]
    return forward(value)


def no_second(_: object) -> Any:
    """Raise in place of the gradient of a gradient, which does not exist.

    Raises:
        InvalidInputError: always.
    """
    raise InvalidInputError("The gradient of a collective's gradient is only there for allreduce.")


def grad_name(name: str | None) -> str | None:
    """Return the name of the collective that computes the gradient of the named one; None for None."""
    return None if name is None else f"{name}.grad"


def call_back(host: Callable[..., list[Array]], tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Call, from a compiled function, a host function that returns a bool and arrays of the tensors' shapes."""
    if type(tensors[0]).__module__.startswith("tensorflow"):
        from choros.hvd.host_ops import tensorflow as on_tensorflow

        return on_tensorflow.call_back(host, tensors)
    from choros.hvd.host_ops import jax as on_jax

    return on_jax.call_back(host, tensors)
