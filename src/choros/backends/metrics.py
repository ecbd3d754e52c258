"""The metrics of a replica as one vector that adds over ranks, the exact loss, and the logs of Keras."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import keras
import numpy as np

from choros.backends.host_values import host_value
from choros.backends.loss_weighting import LossWeightTracker, exact_loss
from choros.backends.metric_additivity import single_metrics
from choros.types import Array

UNUSED = float("-inf")  # the loss of a step that did not update Keras' running loss


class LossSample(NamedTuple):
    """The contribution of one step to the running loss: its mean (``UNUSED``: none) and the weight of that mean.

    Keras' steps use the number of rows as the weight. Most user-defined steps use a weight of 1 for a batch.
    """

    loss: float
    weight: float


class Metrics(ABC):
    """The metric methods of ``BaseReplica``; see ``choros.backends.replica.Replica`` for their documentation.

    Reduced and evaluated batches do not update the loss metric. If a loss does not divide by rows, the mean of the
    ranks' losses is not the loss of the global batch. Two arrays replace the loss metric. One holds the summed loss
    that ``apply`` receives. The other holds this rank's part of each evaluated batch, and belongs to the metric state.
    """

    model: keras.Model
    weigher: LossWeightTracker
    averaged: Sequence[int] = ()  # indices of metric variables that are averaged over ranks, weighted by rows
    _after: Array | None = None  # the metric variables after the last gradients, if a backend has read them
    altered = False  # whether callbacks have changed a setting of the model
    within_fit = False  # whether Keras' loop runs the steps; it then handles the loss metric and the logs

    def _take_metrics(self) -> None:
        """Find the variables of the built model's metrics."""
        self.loss_metric = None if self.within_fit else _loss_metric(self.model)
        self.metric_variables: list[Any] = list(self.model.metrics_variables)
        self._metric_slices = slices_of(self.metric_variables)
        self._names = frozenset[str]() if self.within_fit else self._names_of_results()
        self._means: dict[str, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self._batch_losses: list[Array] = []
        self._rows = 0
        self._trained = [0.0, 0.0]
        self._step_logs_loss = self._by_batch = False
        self._scalars: dict[str, tuple[float, bool]] = {}
        self._logs: dict[str, Any] | None = None

    @abstractmethod
    def _values(self, variables: list[Any]) -> list[Array]:
        """Return the current values of Keras variables on the host; they may be views."""

    @abstractmethod
    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        """Set Keras variables to copies of the arrays, cast to the variables' dtypes."""

    def _names_of_results(self) -> frozenset[str]:
        """Return the names of the metrics' results."""
        return frozenset(flattened(self.model.get_metrics_result()))

    def reset_metrics(self) -> None:
        """Reset the metrics and the losses of batches."""
        self.model.reset_metrics()
        self._forget()

    def metric_state(self) -> Array:
        """Return all metric variables, the number of rows, and the losses of batches, as one flat float64 vector."""
        self._compare()
        values = [np.asarray(value, np.float64).reshape(-1) for value in self._values(self.metric_variables)]
        return self._state_of(values)

    def state_after_gradients(self) -> Array:
        """Return ``metric_state`` directly after ``gradients``. A backend may have read it in the same program."""
        after, self._after = self._after, None
        if after is None:
            return self.metric_state()
        self._compare()
        return self._state_of([after[where] for where in self._metric_slices])

    def _state_of(self, values: list[Array]) -> Array:
        for total, count in self._averaged_means():
            values[total] = values[total] / np.where(values[count], values[count], 1.0)
        for index in self.averaged:
            # Weighted by rows here and divided by all rows in ``_average``, so that a sum over ranks gives the mean.
            values[index] = values[index] * self._rows
        return np.concatenate([*values, [self._rows], *self._batch_losses])

    def _averaged_means(self) -> list[tuple[int, int]]:
        """Return the indices of total and count of each running ``Mean`` among the averaged variables.

        For these, the ranks add means weighted by rows instead of totals. The count of a ``Mean`` may be in rows or in
        batches, so totals would not have the same weights.
        """
        if not self.averaged:
            return []
        index_of = {id(variable): index for index, variable in enumerate(self.metric_variables)}
        single = [part for metric in self.model.metrics for part in single_metrics(metric)]
        means = [metric for metric in single if isinstance(metric, keras.metrics.Mean)]
        pairs = [(index_of.get(id(metric.total), -1), index_of.get(id(metric.count), -1)) for metric in means]
        return [pair for pair in pairs if set(pair) <= set(self.averaged)]

    def _average(self, state: Array, rows: int) -> None:
        """Convert a sum of states over ranks in place: divide averaged variables by the rows."""
        for index in self.averaged:
            state[self._metric_slices[index]] /= rows
        for total, count in self._averaged_means():
            state[self._metric_slices[total]] *= state[self._metric_slices[count]]

    def set_metric_state(self, state: Array) -> None:
        """Set the metric variables and the losses of batches from a metric state, or from a sum of metric states."""
        count = self._metric_slices[-1].stop if self._metric_slices else 0
        # A copy, because ``_average`` changes it in place and callers may still need the sum.
        state, self._rows = np.array(state), max(int(state[count]), 1)
        self._average(state, self._rows)
        self._assign(self.metric_variables, scatter(state[:count], self._metric_slices, self.metric_variables))
        self._batch_losses = [np.array(line) for line in state[count + 1 :].reshape(-1, 3)]

    def metrics(self) -> dict[str, Any]:
        """Return the logs of Keras at this point; ``loss`` is exact if batches were reduced or evaluated."""
        results = self._results()
        if self._logs is not None:
            of_metrics = {name: results[name] for name, (_, is_extra) in self._scalars.items() if not is_extra}
            results = {**self._logs, **of_metrics}
        figures = {name: host_value(value).tolist() for name, value in results.items()}
        return figures | {name: loss for name, loss in self._exact().items() if name in figures}

    def metric_values(self, state: Array) -> list[float]:
        """Return the values of the metric variables in one process, flat, for a sum of metric states.

        Args:
            state: the sum over ranks after training or evaluation, as for ``set_metric_state``.
        """
        count = self._metric_slices[-1].stop if self._metric_slices else 0
        values, rows = np.array(state[:count]), max(int(state[count]), 1)
        self._average(values, rows)
        exact = self._exact()
        if self.loss_metric is not None and self.loss_metric.name in exact:
            weight = rows if self._batch_losses else self._trained[1]
            slice_of = {id(v): where for v, where in zip(self.metric_variables, self._metric_slices, strict=True)}
            values[slice_of[id(self.loss_metric.total)]] = exact[self.loss_metric.name] * weight
            values[slice_of[id(self.loss_metric.count)]] = weight
        figures: list[float] = values.tolist()
        return figures

    def peek(self, state: Array) -> dict[str, Any]:
        """Return the result of ``metrics`` for a sum of metric states; this replica's metrics keep their values.

        If all results are means, they are computed here. Keras' metrics would take as long as a small step.
        """
        if self._logs is None and not self.averaged and not self._batch_losses:
            if self._means is None:
                self._means = self._find_means(state)
            if self._means:
                figures = {name: _mean(state.item(index), state.item(index + 1)) for name, index in self._means.items()}
                return figures | {name: loss for name, loss in self._exact().items() if name in figures}
        return self._peek(state)

    def _peek(self, state: Array) -> dict[str, Any]:
        local_state = self.metric_state()
        self.set_metric_state(state)
        logs = self.metrics()
        self.set_metric_state(local_state)
        return logs

    def _find_means(self, state: Array) -> dict[str, int]:
        """Return the index of each result's total in the state; its count follows. Return {} if a result is not a mean.

        This is found by a trial: each pair of scalars gets a different mean, and each result must equal one of these.
        """
        count = len(self.metric_variables)
        if count % 2 or any(len(v.shape) or str(v.dtype) != "float32" for v in self.metric_variables):
            return {}
        probe = np.array(state)
        # Primes, because a result that combines several of these means is then unlikely to equal one of them.
        primes = [n for n in range(2, 12 * count + 4) if all(n % d for d in range(2, n))][: count // 2]
        probe[0:count:2], probe[1:count:2] = 4.0 * np.array(primes), 4.0
        trained, self._trained = self._trained, [0.0, 0.0]
        logs = self._peek(probe)
        self._trained = trained
        if not all(isinstance(value, float) and value in primes for value in logs.values()):
            return {}
        return {name: 2 * primes.index(int(value)) for name, value in logs.items()}

    def _results(self) -> dict[str, Any]:
        """Return the current results of Keras' metrics."""
        return flattened(self.model.get_metrics_result())

    def _compare(self) -> None:
        """Find out which values of the step's logs are results of metrics, and which the step computed itself."""
        if self._logs is None:
            return
        logs = {name: host_value(value) for name, value in self._logs.items()}
        results = {name: host_value(value) for name, value in self._results().items()}
        exact = self._exact()
        self._scalars = {
            name: (float(value), name not in results or not np.array_equal(value, results[name], equal_nan=True))
            for name, value in logs.items()
            if not value.ndim and name not in exact
        }

    def _custom(self, logs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a step's logs if their names differ from those of the metrics, else None.

        Keras then logs the values of the last step.
        """
        if not isinstance(logs, dict):
            return None
        logs = flattened(logs)
        return logs if logs.keys() != self._names else None

    def _known(self, reported: LossSample, rows: int) -> float:
        """Return the batch's loss; 0, as Keras logs it, if a user-defined step did not update the running loss."""
        if reported.loss != UNUSED:
            self._by_batch |= reported.weight == 1 < rows
            return reported.loss
        self._step_logs_loss |= self._logs is not None  # the step then logs its loss itself
        return 0.0

    def own_logs(self) -> dict[str, tuple[float, bool]] | None:
        """Return the scalars that a user-defined step logged, as of ``metric_state``; None if it logs metrics only.

        With each scalar comes a bool: True if the step computed it, False if it is the result of a metric.
        """
        return None if self._logs is None else self._scalars

    def _count(self, loss: float, rows: int) -> None:
        """Add the exact loss of one reduced batch to the running loss."""
        weight = 1 if self._by_batch else rows
        self._trained[0] += loss * weight
        self._trained[1] += weight

    def loss_to_metric(self) -> None:
        """Move the losses of reduced batches into Keras' running loss, which adds over ranks as after local steps."""
        if self.loss_metric is not None and self._trained[1]:
            state = [self.loss_metric.total, self.loss_metric.count]
            moved = zip(self._values(state), self._trained, strict=True)
            self._assign(state, [np.asarray(value + more) for value, more in moved])
        self._trained = [0.0, 0.0]

    def _exact(self) -> dict[str, float]:
        """Return a dict with the running loss of one process; empty if the steps updated the loss metric."""
        if self._step_logs_loss or self.loss_metric is None:
            return {}
        if self._batch_losses:
            loss = exact_loss(np.stack(self._batch_losses), sums=self.weigher.sums, by_batch=self._by_batch)
            return {self.loss_metric.name: loss}
        return {self.loss_metric.name: self._trained[0] / self._trained[1]} if self._trained[1] else {}


def _mean(total: float, count: float) -> float:
    """Divide in float32, as Keras' ``Mean`` does; return 0 if the count is 0.

    Python divides in float64. Rounding that quotient to float32 gives the same bits, as 53 >= 2 * 24 + 2.
    """
    return c_float(c_float(total).value / c_float(count).value).value if count else 0.0


def flattened(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs in which nested dicts, such as those of compiled metrics, are flattened as in Keras' output."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flattened(value) if isinstance(value, dict) else {name: value})
    return flat


def _loss_metric(model: keras.Model) -> keras.metrics.Mean | None:
    """Return the running mean that Keras logs as ``loss``: the first ``Mean`` with that name, or None."""
    means = (m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss")
    return next(means, None)


def slices_of(variables: list[Any]) -> list[slice]:
    """Return the slice of each variable in the flat vector of all variables."""
    ends = np.cumsum([int(np.prod(v.shape, dtype=np.int64)) for v in variables], dtype=np.int64).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def gather(arrays: list[Array], slices: list[slice], out: Array) -> None:
    """Copy the arrays into a flat vector."""
    for array, where in zip(arrays, slices, strict=True):
        out[where] = array.reshape(-1)


def scatter(vector: Array, slices: list[slice], variables: list[Any]) -> list[Array]:
    """Return views of a flat vector in the shapes of the variables."""
    return [vector[where].reshape(tuple(v.shape)) for where, v in zip(slices, variables, strict=True)]
