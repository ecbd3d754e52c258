"""Reduction of gradients in custom training loops, where ``apply`` or a tape is called.

Eager tensors are reduced at once. Inside ``jax.jit`` and ``tf.function`` tensors have no values yet, so the compiled
program calls back to the host for the reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from choros.backends import step_counter
from choros.backends.metrics import slices_of
from choros.hvd.gradient_reduction import GradientBuffer, ReductionConfig
from choros.hvd.host_ops import call_back
from choros.hvd.tensor_conversion import arrive, is_symbolic
from choros.types import Array

if TYPE_CHECKING:
    from choros.types import Tensor


class EagerGradientReducer:
    """Reduction of lists of gradients of the same variables, in the order of the calls.

    Args:
        config: ReductionConfig.
        name: str. Part of the name that the ranks compare.
    """

    def __init__(self, config: ReductionConfig, name: str) -> None:
        self.config, self.name = config, name
        self._flats: dict[Any, GradientBuffer] = {}

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return whether the optimizer must step now (a tensor inside a compiled function), and the reduced gradients.

        Args:
            grads: tensors of this backend; None if the loss does not depend on a variable.
            variables: the variables, one for each gradient.
        """
        local = self.config.are_local(variables)
        if not self._flats:  # the variables are the same in each step
            self.config.refuse_scales(variables, local)
        dense = [None if g is None else _dense(g) for g in grads]
        present = [i for i, g in enumerate(dense) if g is not None]
        tensors = [dense[i] for i in present]
        present_local = tuple(local[i] for i in present)
        if any(map(is_symbolic, tensors)):
            due, out = call_back(lambda *arrays: self._host(arrays, present_local), tensors)
        else:
            arrays, backs = zip(*map(arrive, tensors), strict=True) if tensors else ((), ())
            due, *reduced = self._host(arrays, present_local)
            out = [back(array) for back, array in zip(backs, reduced, strict=True)]
        gradients: list[Any] = [None] * len(dense)
        for i, value in zip(present, out, strict=True):
            gradients[i] = value
        return due, gradients

    def _host(self, arrays: Sequence[Any], local: Sequence[bool]) -> list[Array]:
        """Reduce arrays; return a bool array, True if a step is due, then the reduced arrays, or zeros if none is."""
        arrays = [np.asarray(array) for array in arrays]
        key = tuple((array.shape, array.dtype) for array in arrays), tuple(local)
        if key not in self._flats or not self._flats[key].current:
            wide = any(array.dtype == np.float64 for array in arrays)
            size = sum(array.size for array in arrays)
            name = f"gradients of {self.name} ({len(arrays)} tensors, {size} values, {sum(local)} local)"
            self._flats[key] = GradientBuffer(
                self.config, slices_of(arrays), local, name, np.float64 if wide else np.float32
            )
        flat = self._flats[key]
        if not flat.add(arrays, 1.0):
            return [np.asarray(False), *(np.zeros_like(array) for array in arrays)]
        reduced = flat.reduce()
        if reduced is None:  # only fit ends an epoch by a flag, so this is not reached
            return [np.asarray(False), *(np.zeros_like(array) for array in arrays)]
        summed, divisor = reduced
        parts = [
            (summed[where] / divisor).reshape(a.shape).astype(a.dtype)
            for where, a in zip(flat.slices, arrays, strict=True)
        ]
        return [np.asarray(True), *parts]


def attach(optimizer: keras.optimizers.Optimizer, config: ReductionConfig) -> None:
    """Make an optimizer's ``apply`` reduce gradients first; the optimizer's class and configuration do not change."""
    plain: Any = optimizer.apply
    plain_stateless: Any = getattr(optimizer, "stateless_apply", None)
    loop = EagerGradientReducer(config, type(optimizer).__name__)
    reduce: Any = loop.reduce
    if keras.backend.backend() == "torch":
        from choros.hvd.host_ops.torch import outside

        reduce = outside(loop.reduce)

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if config.passing or not grads or config.idle:
            return plain(grads, trainable_variables)
        variables = list(trainable_variables) if trainable_variables is not None else optimizer._trainable_variables
        if not optimizer.built:
            optimizer.build(variables)
        due, reduced = reduce(grads, variables)
        with config.through():
            if config.every == 1:
                return plain(reduced, variables)
            if is_symbolic(due):
                return keras.ops.cond(due, lambda: _nothing(plain(reduced, variables)), lambda: _count(optimizer))
            return plain(reduced, variables) if due else _count(optimizer)

    def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        if config.passing or not len(grads) or config.idle or config.every == 1:
            return plain_stateless(optimizer_variables, grads, trainable_variables)
        due, reduced = loop.reduce(list(grads), optimizer._trainable_variables)
        with config.through():
            trained, slots = plain_stateless(optimizer_variables, reduced, trainable_variables)
        place = next(i for i, v in enumerate(optimizer.variables) if v is step_counter(optimizer))
        waiting = list(optimizer_variables)
        waiting[place] = waiting[place] + 1

        def chosen(new: object, old: object) -> Any:
            return keras.ops.where(due, new, old)

        return list(map(chosen, trained, trainable_variables)), list(map(chosen, slots, waiting))

    attributes = optimizer.__dict__
    attributes["apply"], attributes["_choros_reduction"] = apply, config
    attributes["register_local_var"] = config.local.append
    if plain_stateless is not None:
        attributes["stateless_apply"] = stateless_apply


def _count(optimizer: keras.optimizers.Optimizer) -> Any:
    step_counter(optimizer).assign_add(1)
    return _nothing(None)


def _nothing(_: object) -> Any:
    return keras.ops.zeros(())


def _dense(gradient: Tensor) -> Tensor:
    if all(hasattr(gradient, part) for part in ("values", "indices", "dense_shape")):
        return sys.modules["tensorflow"].convert_to_tensor(gradient)
    return gradient
