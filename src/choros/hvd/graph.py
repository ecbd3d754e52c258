"""A function of the host as an operation of the tensor's own library: differentiable, also inside compiled functions.

Eager tensors go to the host and back. Inside ``jax.jit`` and ``tf.function`` (not under XLA there) the compiled program
calls back: ``io_callback``, ordered; ``numpy_function``. The gradient is a collective too, so all ranks must take it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from choros.hvd.tensors import arrive, is_symbolic
from choros.types import Array

Host = Callable[[Array], Array]
Shape = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def operate(value: Any, host: Host, gradient: Callable[[Any], Any], shape: Shape, name: str | None = None) -> Any:
    """Return ``host(value)`` in the library of ``value``.

    Args:
        value: what ``arrive`` takes, or a tensor without values yet.
        host: what is done, on numpy arrays.
        gradient: from the gradient of the result to that of ``value``, on tensors of the library.
        shape: from the shape of ``value`` to that of the result, for compiled functions.
        name: what errors call it.
    """
    if type(value).__module__.partition(".")[0] == "keras" and hasattr(value, "value"):
        value = value.value
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(value, torch.Tensor):
        return _on_torch(value, host, gradient, name)
    if tensorflow is not None and isinstance(value, tensorflow.Tensor | tensorflow.Variable):
        return _on_tensorflow(value, host, gradient, shape, name)
    if is_symbolic(value):
        return _on_jax(value, host, gradient, shape)
    array, back = arrive(value, name)
    return back(host(array))


def _on_torch(value: Any, host: Host, gradient: Callable[[Any], Any], name: str | None) -> Any:
    import torch

    def forward(tensor: Any) -> Any:
        array, back = arrive(tensor, name)
        return back(host(array))

    if not (torch.is_grad_enabled() and value.requires_grad):
        return torch.compiler.disable(forward)(value)

    class Operation(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return forward(tensor)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(grads[0])

    return torch.compiler.disable(Operation.apply)(value)


def _on_tensorflow(value: Any, host: Host, gradient: Callable[[Any], Any], shape: Shape, name: str | None) -> Any:
    import tensorflow as tf

    def forward(tensor: Any) -> Any:
        if is_symbolic(tensor):
            out = tf.numpy_function(host, [tensor], tensor.dtype)
            out.set_shape(shape(tuple(tensor.shape)) if tensor.shape.rank is not None else None)
            return out
        array, back = arrive(tensor, name)
        return back(host(array))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(tensor: Any) -> Any:
        return forward(tensor), gradient

    tensor = tf.convert_to_tensor(value)
    return differentiable(tensor) if tensor.dtype.is_floating else forward(tensor)


def _on_jax(value: Any, host: Host, gradient: Callable[[Any], Any], shape: Shape) -> Any:
    import jax
    from jax.experimental import io_callback

    def forward(tensor: Any) -> Any:
        found = jax.ShapeDtypeStruct(shape(tuple(tensor.shape)), tensor.dtype)
        return io_callback(lambda array: host(np.asarray(array)), found, tensor, ordered=True)

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(lambda tensor: (forward(tensor), None), lambda _, grad: (gradient(grad),))
    return differentiable(value)
