"""What the caller's process does with the given model, on any backend: build it, and read and set its vectors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from choros.backend.base import moving_statistics
from choros.types import Array, Batch


def build_model(model: Any, sample: Batch) -> None:
    """Create what the first ``fit`` would create: weights, optimizer slots, metrics."""
    parts = (sample.x, sample.y, sample.sample_weight)
    used = 3 if sample.sample_weight is not None else 2 if sample.y is not None else 1
    model._symbolic_build(data_batch=tuple(parts[:used]))


def flat_vectors(model: Any) -> tuple[Array, Array]:
    """Return the trainable vector and the moving statistics, laid out as the replicas lay them out."""
    wide = any(keras.backend.standardize_dtype(v.dtype) == "float64" for v in model.trainable_variables)
    dtype = np.dtype(np.float64 if wide else np.float32)
    return _flat(model.trainable_variables, dtype), _flat(moving_statistics(model), dtype)


def split_vector(model: Any, vector: Array) -> list[Array]:
    """Cut a trainable vector into arrays in the order of ``model.trainable_variables``."""
    return _split(model.trainable_variables, vector)


def assign_vectors(model: Any, trainable: Array, others: Array) -> None:
    """Set the model's trainable variables and moving statistics; always copies."""
    moving = moving_statistics(model)
    for variables, vector in ((model.trainable_variables, trainable), (moving, others)):
        for variable, part in zip(variables, _split(variables, vector), strict=True):
            variable.assign(part)


def _flat(variables: list[Any], dtype: Any) -> Array:
    parts = [np.asarray(keras.ops.convert_to_numpy(v), dtype).reshape(-1) for v in variables]
    return np.concatenate([*parts, np.empty(0, dtype)])


def _split(variables: list[Any], vector: Array) -> list[Array]:
    sizes = [int(np.prod(v.shape, dtype=np.int64)) for v in variables]
    ends = np.cumsum([0, *sizes])
    return [
        np.array(vector[begin:end]).reshape(tuple(v.shape))
        for v, begin, end in zip(variables, ends[:-1], ends[1:], strict=True)
    ]
