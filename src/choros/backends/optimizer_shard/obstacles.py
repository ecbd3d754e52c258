"""The conditions under which the ranks of a host divide the optimizer's update."""

from __future__ import annotations

from typing import Any

import keras

from choros.backends import inner_optimizer
from choros.backends.optimizer_shard.independence import independent_unit
from choros.backends.optimizer_shard.optimizer_copy import slot_lists
from choros.backends.rowwise_parts import of_keras
from choros.backends.variable_groups import vector_dtype

_DTYPES = ("float32", "float64")


def obstacle(model: keras.Model, tries: bool = False) -> str:
    """Return the reason why the optimizer's update of a model cannot be divided among ranks; "" if it can be.

    Args:
        model: built and compiled.
        tries: whether a trial decides about an optimizer of the user (``independent_unit``).
    """
    optimizer, trainable = inner_optimizer(model.optimizer), list(model.trainable_variables)
    if not of_keras(type(model).train_step) or model.run_eagerly:
        return "the model has its own train_step or runs eagerly"
    if optimizer is not model.optimizer and not of_keras(type(model.optimizer)):
        return f"{type(model.optimizer).__name__} is not the LossScaleOptimizer of Keras"
    if {"apply", "stateless_apply"} & {*vars(optimizer), *vars(model.optimizer)}:
        return "the optimizer's apply was replaced"
    if optimizer.global_clipnorm is not None and (optimizer.clipnorm is not None or optimizer.clipvalue is not None):
        return "global_clipnorm is set together with another kind of clipping"
    return (
        _of_variables(optimizer, trainable) or _of_slots(optimizer) or independent_unit(optimizer, trainable, tries)[1]
    )


def _of_variables(optimizer: keras.optimizers.Optimizer, trainable: list[Any]) -> str:
    if not trainable:
        return "the model has no trainable weights"
    if list(map(id, optimizer._trainable_variables)) != list(map(id, trainable)):
        return "the optimizer was built for other variables than the trainable ones"
    for variable in trainable:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in _DTYPES or getattr(variable, "overwrite_with_gradient", False):
            return f"{variable.path} has the dtype {dtype}: only float32 and float64 are shared"
        if getattr(variable, "_layout", None) is not None:
            return f"{variable.path} is divided among devices"
    if str(vector_dtype(trainable)) == "float64" and any(str(v.dtype) != "float64" for v in trainable):
        return "the weights have several dtypes"
    return ""


def _of_slots(optimizer: keras.optimizers.Optimizer) -> str:
    known = {id(slot) for slots in slot_lists(optimizer).values() for slot in slots}
    known |= {id(value) for value in vars(optimizer).values() if isinstance(value, keras.Variable)}
    for variable in optimizer.variables:
        if id(variable) not in known:
            return f"the optimizer has a variable that belongs to no weight, {variable.path}"
    return ""
