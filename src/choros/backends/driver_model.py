"""Functions for the user's model in the driver, on any backend: build it, read and set its vectors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from choros.backends import averages_of
from choros.backends.batch_parts import blind, parts
from choros.backends.encoded_inputs import as_keras_input, symbol
from choros.backends.host_values import host_value
from choros.backends.metrics import gather, scatter, slices_of
from choros.backends.optimizers import build_held, optimizer_variables
from choros.backends.rowwise_parts import of_keras
from choros.backends.variable_groups import moving_statistics, vector_dtype
from choros.errors import InvalidInputError, brief
from choros.types import Array, Batch, aligned_copy, same_bits


def host_views(variables: Sequence[Any]) -> list[Array]:
    """Return the values of Keras variables on the host, without a copy if possible.

    On PyTorch an array may share the variable's memory and change with it. On JAX and TensorFlow it keeps its values.
    """
    if keras.backend.backend() == "jax":
        return [np.asarray(variable.value) for variable in variables]
    backend = importlib.import_module(f"choros.backends.{keras.backend.backend()}")
    return [backend.read(variable.value) for variable in variables]


def kept_values(variables: Sequence[Any]) -> list[Array]:
    """Return the values of Keras variables on the host, which later changes of the variables leave as they are."""
    views = host_views(variables)
    return [np.array(view) for view in views] if keras.backend.backend() == "torch" else views


def marks(variables: Sequence[Any]) -> list[Any]:
    """Return a mark of each variable's value. The mark changes when the variable is set.

    PyTorch counts the changes of a tensor. JAX and TensorFlow store each new value in a new array.
    """
    if keras.backend.backend() == "torch":
        return [(variable.value.data_ptr(), variable.value._version) for variable in variables]
    if keras.backend.backend() == "jax":
        return [variable.value for variable in variables]
    return host_views(variables)


def same_mark(old: Any, new: Any) -> bool:
    """Return whether a variable was left unchanged between two of its marks."""
    if isinstance(old, np.ndarray):
        return same_bits(old, new)
    return bool(old == new) if isinstance(old, tuple) else old is new


def assign_views(variables: Sequence[Any], views: Sequence[Array]) -> None:
    """Set Keras variables to arrays in memory that other processes write.

    On PyTorch the values are copied into the variable's memory. On JAX and TensorFlow the variable takes the memory of
    a copy. A variable that already has the value, such as a frozen one, keeps its memory.
    """
    backend = importlib.import_module(f"choros.backends.{keras.backend.backend()}")
    copied = aligned_copy if keras.backend.backend() == "jax" else backend.copied
    for variable, view in zip(variables, views, strict=True):
        if keras.backend.backend() == "torch":
            backend.write(variable.value.detach(), view)
        # Large frozen weights usually have the value already. A copy of them would take time and memory for nothing.
        elif not same_bits(host_views([variable])[0], view):
            variable.assign(copied(view))


def check_target(model: keras.Model, sample: Batch) -> None:
    """Refuse training data without y, if the compiled loss needs it.

    Raises:
        InvalidInputError: y is missing.
    """
    if sample.y is None and _needs_target(model):
        raise InvalidInputError(
            f"y is missing, which the compiled loss of the model {model.name!r} needs: give fit(x, y), or data that "
            "yield (x, y)."
        )


def build_model(model: keras.Model, sample: Batch) -> None:
    """Create the variables that the first ``fit`` creates: weights, slots of all optimizers, metrics.

    Raises:
        InvalidInputError: the model cannot take such data. The message contains Keras' error in one line.
    """
    # A user-defined train_step may use a compiled loss without y, as diffusion models do.
    data = keras.tree.map_structure(as_keras_input, parts(sample))
    own_step = not of_keras(getattr(type(model), "train_step", None))
    try:
        with blind(model, sample) if own_step else nullcontext():
            model._symbolic_build(data_batch=data)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(model, sample, "these data", error) from error
    build_held(model, data)


def check_validation(model: keras.Model, sample: Batch, trained: Batch) -> None:
    """Refuse validation data that the built model or its losses cannot take.

    The step is traced only if a row differs in structure, shape or kind of dtype from a row of the training data. The
    data of a user-defined ``test_step`` are not checked.

    Args:
        model: a built model.
        sample: a batch of validation data.
        trained: a batch of training data.

    Raises:
        InvalidInputError: the message contains Keras' error in one line.
    """
    if not of_keras(getattr(type(model), "test_step", None)):
        return
    if sample.y is None and _needs_target(model):
        raise InvalidInputError(
            f"validation_data has no y, which the compiled loss of the model {model.name!r} needs: give "
            "validation_data=(x, y), or data that yield (x, y)."
        )
    if _row(sample) == _row(trained):
        return
    symbols = keras.tree.map_structure(lambda leaf: symbol(leaf, sample.rows), parts(sample))
    x, y, weight = keras.utils.unpack_x_y_sample_weight(symbols)
    try:
        outputs = model.compute_output_spec(x)
        _LossOf(model).compute_output_spec(x, y, outputs, weight)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(model, sample, "the validation data", error) from error


def _needs_target(model: keras.Model) -> bool:
    """Return whether Keras' steps compare outputs with y. A user-defined step may use a compiled loss without y."""
    steps = [getattr(type(model), name, None) for name in ("train_step", "compute_loss")]
    return all(map(of_keras, steps)) and any(loss is not None for loss in keras.tree.flatten(model.loss))


def _refusal(model: keras.Model, sample: Batch, data: str, error: Exception) -> InvalidInputError:
    """Return the error for data that a model cannot take, with Keras' error in one line."""
    shapes = keras.tree.map_structure(lambda array: tuple(array.shape[1:]), sample.x)
    return InvalidInputError(
        f"The model {model.name!r} cannot take {data} (x is of shape {shapes} a row"
        f"{', without y' if sample.y is None else ''}): {_labels(model, sample.y) or brief(error)}"
    )


class _LossOf(keras.Operation):  # type: ignore[misc]
    """The loss of a model, of which only the shape is computed."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model

    def call(self, *data: Any) -> Any:
        """Return the loss of x, y, outputs and sample weights."""
        return self.model.compute_loss(*data)


def _row(batch: Batch) -> Any:
    """Return the structure of a batch, with the shape of a row and the kind of dtype of each array."""

    def form(array: Any) -> Any:
        return None if array is None else (str(np.shape(array)[1:]), array.dtype.kind)

    return keras.tree.map_structure(form, [batch.x, batch.y])


def _labels(model: keras.Model, y: object) -> str:
    """Describe labels that do not fit a categorical or sparse categorical loss; "" if all labels fit."""
    for loss, target in pairs(model.loss, y):
        name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
        shape = np.shape(target)[1:]
        if name == "categorical_crossentropy" and np.prod(shape) == 1:
            return (
                "the labels are class numbers, and the loss categorical_crossentropy takes one-hot vectors: compile "
                "with 'sparse_categorical_crossentropy', or make vectors of them (keras.utils.to_categorical; in "
                "Spark OneHotEncoder(dropLast=False))."
            )
        if name == "sparse_categorical_crossentropy" and len(shape) == 1 and shape[0] > 1:
            return (
                f"the labels are vectors of {shape[0]}, and the loss sparse_categorical_crossentropy takes class "
                "numbers: compile with 'categorical_crossentropy', or make numbers of them (argmax; in Spark a column "
                "of indices, as of StringIndexer)."
            )
    return ""


def pairs(losses: object, targets: object) -> list[tuple[Any, Any]]:
    """Return each loss of a compiled model with the target of its output.

    Args:
        losses: as given to ``compile``: one loss, a list, or a dict by the outputs' names.
        targets: values of any type, nested in the same way.

    Example:
        >>> pairs({"a": "mse", "b": "mae"}, {"b": 2, "a": 1}), pairs("mse", 3)
        ([('mse', 1), ('mae', 2)], [('mse', 3)])
    """
    if isinstance(losses, dict):
        return [(loss, targets[key]) for key, loss in losses.items() if isinstance(targets, dict) and key in targets]
    if isinstance(targets, dict):
        return [(losses, target) for target in targets.values()]
    if isinstance(targets, (list, tuple)):
        loss_list = losses if isinstance(losses, (list, tuple)) else [losses] * len(targets)
        return list(zip(loss_list, targets, strict=False))
    return [(losses, targets)]


def flat_vectors(model: keras.Model) -> tuple[Array, Array]:
    """Return the trainable vector and the moving statistics, in the layout of the replicas."""
    dtype = vector_dtype(model.trainable_variables)
    return _flat(model.trainable_variables, dtype), _flat(moving_statistics(model), dtype)


def vector_nbytes(model: keras.Model) -> int:
    """Return the bytes of the trainable vector."""
    variables = model.trainable_variables
    return int(sum(math.prod(variable.shape) for variable in variables)) * vector_dtype(variables).itemsize


def split_vector(model: keras.Model, vector: Array) -> list[Array]:
    """Split a trainable vector into copies in the shapes and the order of ``model.trainable_variables``."""
    return _split(model.trainable_variables, vector)


def assign_vectors(model: keras.Model, trainable: Array, statistics: Array) -> None:
    """Set the model's trainable variables and moving statistics to copies of flat vectors."""
    moving = moving_statistics(model)
    for variables, vector in ((model.trainable_variables, trainable), (moving, statistics)):
        for variable, part in zip(variables, _split(variables, vector), strict=True):
            variable.assign(part)


def assign_optimizer(model: keras.Model, arrays: list[Array]) -> None:
    """Set the optimizers' variables except the learning rate, which the caller's callbacks have set.

    Args:
        model: compiled and built.
        arrays: values in the order of ``optimizer_variables``.
    """
    rate = model.optimizer.learning_rate
    for variable, value in zip(optimizer_variables(model), arrays, strict=True):
        if variable is not rate:
            variable.assign(value)


def assign_average(model: keras.Model, average: Array, finalize: bool = False) -> None:
    """Set the moving averages that the optimizer keeps of the trainable variables.

    Args:
        model: compiled and built, its optimizer with ``use_ema``.
        average: a flat vector in the layout of the trainable vector.
        finalize: if True, also set the trainable variables to their averages, as at the end of Keras' ``fit``.
    """
    averages = averages_of(model.optimizer)
    for variable, value in zip(model.trainable_variables, split_vector(model, average), strict=True):
        if id(variable) in averages:
            averages[id(variable)].assign(value)
            if finalize:
                variable.assign(value)


def _flat(variables: list[Any], dtype: np.typing.DTypeLike) -> Array:
    slices = slices_of(variables)
    vector = np.empty(slices[-1].stop if slices else 0, dtype)
    gather(list(map(host_value, variables)), slices, vector)
    return vector


def _split(variables: list[Any], vector: Array) -> list[Array]:
    return [np.array(part) for part in scatter(vector, slices_of(variables), variables)]
