"""Calls back to the host in programs that JAX compiles: ``io_callback``, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from choros.types import Array


def operate(value: Any, host: Callable[[Array], Array], gradient: Callable[[Any], Any], shape: Any) -> Any:
    """Return ``host(value)`` of a traced value; see ``choros.hvd.graph.operate``."""

    def forward(tensor: Any) -> Any:
        found = jax.ShapeDtypeStruct(shape(tuple(tensor.shape)), tensor.dtype)
        return io_callback(lambda array: host(np.asarray(array)), found, tensor, ordered=True)

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(lambda tensor: (forward(tensor), None), lambda _, grad: (gradient(grad),))
    return differentiable(value)


def call_back(host: Callable[..., list[Array]], tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Call the host; see ``choros.hvd.graph.call_back``."""
    shapes = [jax.ShapeDtypeStruct((), np.bool_), *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors)]
    due, *out = io_callback(host, shapes, *tensors, ordered=True)
    return due, out
