"""Calls to the host from programs that JAX compiles, by ordered ``io_callback``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from choros.types import Array


def operate(value: jax.Array, host: Callable[[Array], Array], gradient: Callable[[Any], Any], shape: Any) -> jax.Array:
    """Return ``host(value)`` for a traced value; see ``choros.hvd.host_ops.operate``."""

    def forward(tensor: jax.Array) -> jax.Array:
        result_type = jax.ShapeDtypeStruct(shape(tuple(tensor.shape)), tensor.dtype)
        return io_callback(_recorded_call(lambda array: host(np.asarray(array))), result_type, tensor, ordered=True)

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(lambda tensor: (forward(tensor), None), lambda _, grad: (gradient(grad),))
    return differentiable(value)


def call_back(host: Callable[..., list[Array]], tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Call the host; see ``choros.hvd.host_ops.call_back``."""
    shapes = [jax.ShapeDtypeStruct((), np.bool_), *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors)]
    due, *out = io_callback(_recorded_call(host), shapes, *tensors, ordered=True)
    return due, out


def settle() -> None:
    """Wait for the host calls of all started programs: JAX returns before a program has run.

    Inside such a host call it does nothing, as it would wait for itself.
    """
    if not getattr(_within, "call", False):
        jax.effects_barrier()


_within = threading.local()


def _recorded_call(host: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: Any) -> jax.Array:
        _within.call = True
        try:
            return host(*arrays)
        finally:
            _within.call = False

    return call
