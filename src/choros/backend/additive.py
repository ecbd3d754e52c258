"""Which metrics add over ranks: Keras' own do; another class is tried on a few rows before anything starts."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from choros.types import Array, Batch


def not_additive(model: Any, sample: Batch) -> list[int]:
    """Return the places, among ``model.metrics_variables``, of the variables of metrics that do not add over ranks.

    A metric class that is not Keras' own is tried: the states that the two halves of the sample leave must sum to
    the state that the whole leaves. Where they do not, the ranks' states will be averaged by rows, with a warning.

    Args:
        model: the built and compiled model; its metrics are reset, nothing else changes.
        sample: some rows; with fewer than two nothing can be tried.

    Returns:
        Indices, empty for metrics of Keras.
    """
    place = {id(variable): index for index, variable in enumerate(model.metrics_variables)}
    single = [m for metric in model.metrics for m in _single(metric)]
    foreign = [m for m in single if not type(m).__module__.startswith("keras.") and m.variables]
    if not foreign or sample.rows < 2:
        return []
    half = sample.rows // 2
    whole, first, second = (_state(model, sample, rows) for rows in (slice(None), slice(half), slice(half, None)))
    found: list[int] = []
    for metric in foreign:
        indices = [place[id(v)] for v in metric.variables if id(v) in place]
        if all(np.allclose(first[i] + second[i], whole[i], rtol=1e-3, atol=1e-6) for i in indices):
            continue
        found += indices
        warnings.warn(
            f"The metric {metric.name!r} ({type(metric).__name__}) does not add up over parts of the data: what is "
            "shown is the mean of the workers' values, weighted by their rows.",
            stacklevel=2,
        )
    return found


def _single(metric: Any) -> list[Any]:
    """The metrics in Keras' container of what ``compile`` was given, or the metric itself."""
    children = getattr(metric, "metrics", None)
    return [m for child in children for m in _single(child)] if children else [metric]


def _state(model: Any, sample: Batch, rows: slice) -> list[Array]:
    """The metric variables after one test step on these rows."""
    parts = (sample.x, sample.y, sample.sample_weight)
    data = [keras.tree.map_structure(lambda a: None if a is None else a[rows], part) for part in parts]
    model.reset_metrics()
    model.test_on_batch(*data)
    state = [np.array(keras.ops.convert_to_numpy(v), np.float64) for v in model.metrics_variables]
    model.reset_metrics()
    return state
