"""A stand-in for the optimizer of a traced JAX step, which stores the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras

from choros.backends import step_counter

Arrays = list[jax.Array]


@contextmanager
def kept_gradients(
    optimizer: keras.optimizers.Optimizer,
    shifts: Any = None,
    gives: list[Any] | None = None,
    becomes: tuple[Any, Any] | None = None,
) -> Iterator[list[list[Any]]]:
    """Replace ``optimizer.stateless_apply`` by a stand-in that stores the gradients and does not update.

    Args:
        optimizer: the compiled optimizer.
        shifts: numbers that the stand-in adds to the weights. If any is not 0, it also increments the step counter.
        gives: gradients that the real optimizer gets instead of those of the step.
        becomes: the weights and optimizer variables that the stand-in returns.

    Yields:
        A list, to which each call of the stand-in appends its gradients.
    """
    captured: list[list[Any]] = []
    attributes, plain = optimizer.__dict__, optimizer.stateless_apply
    before = {
        name: attributes[name] for name in ("stateless_apply",) if name in attributes
    }  # set by ``hvd.DistributedOptimizer``
    counter = next(i for i, variable in enumerate(optimizer.variables) if variable is step_counter(optimizer))

    def stateless_apply(optimizer_variables: Arrays, grads: Arrays, trainable_variables: Arrays) -> tuple[Any, Any]:
        captured.append(list(grads))
        if gives is not None:
            updated: tuple[Any, Any] = plain(optimizer_variables, gives, trainable_variables)
            return updated
        if becomes is not None:
            return becomes
        if shifts is not None:
            trainable_variables = [v + shifts[i].astype(v.dtype) for i, v in enumerate(trainable_variables)]
            optimizer_variables = list(optimizer_variables)
            optimizer_variables[counter] += jnp.any(shifts != 0).astype(optimizer_variables[counter].dtype)
        return trainable_variables, optimizer_variables

    attributes["stateless_apply"] = stateless_apply
    try:
        yield captured
    finally:
        del attributes["stateless_apply"]
        attributes.update(before)
