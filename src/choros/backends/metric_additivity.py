"""Detection of metrics whose states do not add over ranks. User-defined metrics are tried before training."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import keras
import numpy as np

from choros.backends.encoded_inputs import as_keras_input
from choros.backends.host_values import host_value
from choros.backends.rowwise_parts import flat, flat_outputs, plain
from choros.errors import brief, warn
from choros.types import Array, Batch


def not_additive(model: keras.Model, sample: Batch) -> list[int]:
    """Return the indices of variables of metrics that do not add over ranks, in ``model.metrics_variables``.

    User-defined metric classes and functions, and running means of a user-defined ``train_step``, are tried. So are
    metrics of Keras along an axis that may be the axis of the rows (``PearsonCorrelation(axis=0)``).

    The metric states after each half of the sample must sum to the state after the whole sample. The state after the
    rows of a half given twice must be twice the state after the half. If a metric fails, a warning is given, and the
    ranks' states will be averaged with their rows as weights.

    Args:
        model: the built and compiled model. Its metrics are reset.
        sample: some rows. With fewer than two rows there is no trial.

    Returns:
        Indices; an empty list if all metrics add up.
    """
    _warn_of_derived_logs(model, sample)
    index_of = {id(variable): index for index, variable in enumerate(model.metrics_variables)}
    single = [m for metric in model.metrics for m in single_metrics(metric)]
    _warn_of_values_outside_variables(model, single, sample)
    foreign = [m for m in single if m.variables and (_foreign(m, model) or _may_cross_rows(m, model, sample))]
    if not foreign or sample.rows < 2:
        return []
    try:
        full_state, expected = _states(model, sample)
    except Exception as error:  # a model that can be trained may have no test step
        model.reset_metrics()
        if type(model).call is not keras.Model.call:  # without call() a model has no test step
            warn(
                f"The metrics {', '.join(repr(m.name) for m in foreign)} could not be tried on some rows, as test_step "
                f"of model {model.name!r} raised {brief(error)}; the logs show the mean of the workers' values, "
                "weighted by their rows."
            )
        untried = [metric for metric in foreign if type(metric) is keras.metrics.Mean]
        return [index_of[id(v)] for metric in untried for v in metric.variables if id(v) in index_of]
    sample_rows: list[int] = []
    for metric in foreign:
        indices = [index_of[id(v)] for v in metric.variables if id(v) in index_of]
        tried = any(full_state[i].any() for i in indices)
        adds = tried and all(_are_close(value[i], sums[i]) for value, sums in expected for i in indices)
        if adds or not (tried or type(metric) is keras.metrics.Mean):
            continue
        sample_rows += indices
        why = "does not add up over parts of the data" if tried else "is updated by no test_step, so it was not tried"
        warn(
            f"The metric {metric.name!r} ({type(metric).__name__}) {why}: the logs show the mean of the workers' "
            "values, weighted by their rows."
        )
    return sample_rows


def _warn_of_derived_logs(model: keras.Model, sample: Batch) -> None:
    """Warn if an overridden ``compute_metrics`` logs values that are not results of metrics.

    The method sees the metrics of one rank. A value that it derives from their results is thus the value of one rank.
    """
    if type(model).compute_metrics is keras.Model.compute_metrics:
        return
    logs: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a model that can be trained may have no test step; see ``not_additive``
        logs = model.test_on_batch(*_parts(sample, np.arange(sample.rows)), return_dict=True)
    derived = sorted(logs.keys() - model.get_metrics_result().keys())
    model.reset_metrics()
    if derived:
        warn(
            f"compute_metrics of {type(model).__name__} logs {', '.join(map(repr, derived))}, which no metric holds: "
            "the logs show the mean of the workers' values, weighted by their rows. Override get_metrics_result "
            "instead, where the metrics hold the values of all workers."
        )


def _warn_of_values_outside_variables(model: keras.Model, single: list[Any], sample: Batch) -> None:
    """Warn if a user-defined metric has no variables and changes other attributes, such as a list of predictions.

    Only variables are added over the ranks.
    """
    suspects = [m for m in single if not m.variables and not type(m).__module__.startswith("keras.")]
    if not suspects:
        return
    before = [_attributes(metric) for metric in suspects]
    with contextlib.suppress(Exception):  # as above
        model.test_on_batch(*_parts(sample, np.arange(sample.rows)))
    changed = [metric for metric, then in zip(suspects, before, strict=True) if _attributes(metric) != then]
    model.reset_metrics()
    for metric in changed:
        warn(
            f"The metric {metric.name!r} ({type(metric).__name__}) keeps its values outside of variables, so the "
            "logs show the value of rank 0's rows: keep them in variables (add_variable), or calculate it in a "
            "callback."
        )


def _attributes(metric: keras.Metric) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(metric).items()}


def rate_stays_in_optimizer(model: keras.Model) -> bool:
    """Return whether only the optimizer can read the learning rate in a step, as all other parts are Keras' own."""
    return plain(model) and not any(_foreign(m, model) for metric in model.metrics for m in single_metrics(metric))


def _foreign(metric: keras.Metric, model: keras.Model) -> bool:
    """Return whether a metric is user-defined: its class, its function, or a running mean that Keras did not create."""
    if not type(metric).__module__.startswith("keras."):
        return True
    if type(metric) is keras.metrics.Mean:
        internal = [model._loss_tracker, *getattr(model._compile_loss, "metrics", ())]
        return metric.name != "loss" and all(metric is not internal_metric for internal_metric in internal)
    function = getattr(metric, "_fn", None)
    return function is not None and not str(function.__module__).startswith("keras.")


def _may_cross_rows(metric: keras.Metric, model: keras.Model, sample: Batch) -> bool:
    """Return whether a metric of Keras reduces along an axis that may be the axis of the rows."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    function, outputs = metric._fn, flat_outputs(model)
    if outputs is not False and flat(sample.y) and not function.__name__.startswith("sparse"):
        return True  # the last axis is the axis of the rows: the metric has one value for a batch
    return "axis" in inspect.signature(function).parameters and metric._fn_kwargs.get("axis", -1) != -1


def single_metrics(metric: keras.Metric) -> list[Any]:
    """Return the metrics inside Keras' container of compiled metrics, or the metric itself.

    Args:
        metric: keras.Metric.
    """
    children = getattr(metric, "metrics", None)
    return [m for child in children for m in single_metrics(child)] if children else [metric]


def _states(model: keras.Model, sample: Batch) -> tuple[list[Array], list[tuple[list[Array], list[Array]]]]:
    """Return the metric state after the whole sample, and pairs of states that are equal if all metrics add up.

    The pairs are: the whole sample and the sum of its halves; each half with its rows given twice and twice the half,
    which is equal for a maximum only if it is 0.
    """
    half = sample.rows // 2
    parts = [np.arange(half), np.arange(half, sample.rows)]
    full_state, first, second = (_state(model, sample, rows) for rows in (np.arange(sample.rows), *parts))
    pairs = [(full_state, [value + other for value, other in zip(first, second, strict=True)])]
    for rows, state in zip(parts, (first, second), strict=True):
        pairs.append((_state(model, sample, np.tile(rows, 2)), [2 * value for value in state]))
    return full_state, pairs


def _are_close(value: Array, expected: Array) -> bool:
    return np.allclose(value, expected, 1e-3, 1e-6, equal_nan=True)


def _state(model: keras.Model, sample: Batch, rows: Array) -> list[Array]:
    """Return the values of the metric variables after one test step on these rows."""
    data = _parts(sample, rows)
    model.reset_metrics()
    model.test_on_batch(*data)
    state = [host_value(v).astype(np.float64) for v in model.metrics_variables]
    model.reset_metrics()
    return state


def _parts(sample: Batch, rows: Array) -> list[Any]:
    """Return x, y and sample weights of these rows."""
    parts = (sample.x, sample.y, sample.sample_weight)
    return [keras.tree.map_structure(lambda a: None if a is None else _tensor(a[rows]), part) for part in parts]


def _tensor(array: object) -> Any:
    """Return an array as ``fit`` passes it. On PyTorch, Keras' ``test_on_batch`` does not convert to tensors."""
    return keras.ops.convert_to_tensor(array) if keras.backend.backend() == "torch" else as_keras_input(array)
