"""The conditions under which the ranks of a host divide the optimizer's update."""

from __future__ import annotations

from typing import Any

import keras

from choros.backends.optimizer_shard.layout import BY_VARIABLE, ELEMENTWISE, slot_lists
from choros.backends.rowwise_parts import of_keras
from choros.backends.variable_groups import vector_dtype

_DTYPES = ("float32", "float64")


def obstacle(model: keras.Model) -> str:
    """Return the reason why the optimizer's update of a model cannot be divided among ranks; "" if it can be.

    Args:
        model: built and compiled.
    """
    optimizer, trainable = model.optimizer, list(model.trainable_variables)
    name = type(optimizer).__name__
    if not of_keras(type(model).train_step) or model.run_eagerly:
        return "the model has its own train_step or runs eagerly"
    if not of_keras(type(optimizer)) or name not in ELEMENTWISE | BY_VARIABLE:
        return f"it is not known whether {name} updates each variable independently"
    if {"apply", "stateless_apply"} & vars(optimizer).keys():
        return "the optimizer's apply was replaced"
    if optimizer.global_clipnorm is not None:
        others = optimizer.clipnorm, optimizer.clipvalue, optimizer.gradient_accumulation_steps
        if any(other is not None for other in others):
            return "global_clipnorm is set together with another kind of clipping or with accumulation"
    return _of_variables(optimizer, trainable) or _of_slots(optimizer)


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
