"""The metrics of a replica as one vector that adds over ranks, the exact loss, and what Keras would log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from choros.backend.weight import Weigher, exact_loss
from choros.types import Array

UNUSED = float("-inf")  # the loss of a step that left Keras' running loss alone


class Metrics(ABC):
    """The half of ``BaseReplica`` that knows metrics; see ``choros.backend.replica.Replica`` for the meanings.

    The loss metric is kept out of reduced and of evaluated batches: a mean of the ranks' losses is not the loss of
    the global batch where it divides by something else than rows. Its place is taken by two tallies: of the summed
    loss that ``apply`` sees, and of each evaluated batch's part, which travels with the metric state.
    """

    model: Any
    weigher: Weigher
    averaged: Sequence[int] = ()  # places of metric variables that do not add: their mean over ranks, weighted by rows
    within_fit = False  # whether Keras' own loop drives the steps: loss metric and logs are then left to it

    def _take_metrics(self) -> None:
        """Once the model is built: find its metrics' variables."""
        self.loss_metric = None if self.within_fit else _loss_metric(self.model)
        self.metric_variables: list[Any] = list(self.model.metrics_variables)
        self._metric_slices = slices_of(self.metric_variables)
        self._names: set[str] = set() if self.within_fit else set(self.model.get_metrics_result())
        self._forget()

    def _forget(self) -> None:
        self._tally: list[Array] = []
        self._rows = 0
        self._trained = [0.0, 0.0]
        self._untold = False
        self._logs: dict[str, Any] | None = None

    @abstractmethod
    def _values(self, variables: list[Any]) -> list[Array]:
        """The present values of these Keras variables on the host; they may be views."""

    @abstractmethod
    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        """Set these Keras variables, cast to their dtype; always copies."""

    def reset_metrics(self) -> None:
        """Forget what the metrics and the tallies have seen."""
        self.model.reset_metrics()
        self._forget()

    def metric_state(self) -> Array:
        """All metric variables, the rows seen, and the tally of evaluated batches, as one flat float64 vector."""
        values = [np.asarray(value, np.float64).reshape(-1) for value in self._values(self.metric_variables)]
        for index in self.averaged:
            values[index] = values[index] * self._rows
        return np.concatenate([*values, [self._rows], *self._tally])

    def set_metric_state(self, state: Array) -> None:
        """Set the metric variables and the tally from such a vector, or from a sum of them."""
        count = self._metric_slices[-1].stop if self._metric_slices else 0
        state, self._rows = np.array(state), max(int(state[count]), 1)
        for index in self.averaged:
            state[self._metric_slices[index]] /= self._rows
        self._assign(self.metric_variables, scatter(state[:count], self._metric_slices, self.metric_variables))
        self._tally = [np.array(line) for line in state[count + 1 :].reshape(-1, 3)]

    def metrics(self) -> dict[str, Any]:
        """What Keras would log now; ``loss`` is the exact one where batches were reduced or evaluated."""
        results = self.model.get_metrics_result() if self._logs is None else self._logs
        figures = {name: keras.ops.convert_to_numpy(value).tolist() for name, value in results.items()}
        loss = None if self._untold else self._exact_loss()
        if self.loss_metric is not None and loss is not None and self.loss_metric.name in figures:
            figures[self.loss_metric.name] = loss
        return figures

    def _custom(self, logs: Any) -> dict[str, Any] | None:
        """A step's logs where they are not the metrics' but a user's own: then Keras logs the last step's."""
        return logs if isinstance(logs, dict) and set(logs) != self._names else None

    def _known(self, loss: float) -> float:
        """The batch's loss; 0, as Keras logs it, where a user's own step left the running loss alone."""
        if loss != UNUSED:
            return loss
        self._untold |= self._logs is not None  # then the step logs a loss of its own
        return 0.0

    def own_logs(self) -> dict[str, float] | None:
        """What a user's own step last logged, numbers only; None where a step logs Keras' metrics."""
        if self._logs is None:
            return None
        figures = {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in self._logs.items()}
        exact = None if self._untold or self.loss_metric is None else self.loss_metric.name
        return {name: float(value) for name, value in figures.items() if not value.ndim and name != exact}

    def _count(self, loss: float, rows: int) -> None:
        """Count the exact loss of one reduced batch."""
        self._trained[0] += loss * rows
        self._trained[1] += rows

    def _exact_loss(self) -> float | None:
        if self._tally:
            return exact_loss(np.stack(self._tally), sums=self.weigher.sums)
        if self._trained[1]:
            return self._trained[0] / self._trained[1]
        return None


def _loss_metric(model: Any) -> Any:
    """The running mean that Keras logs as ``loss``: the model's first ``Mean`` of that name, or None."""
    means = (m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss")
    return next(means, None)


def slices_of(variables: list[Any]) -> list[slice]:
    """Where each variable lies in a flat vector of them all."""
    ends = np.cumsum([int(np.prod(v.shape, dtype=np.int64)) for v in variables], dtype=np.int64).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def gather(arrays: list[Array], slices: list[slice], out: Array) -> None:
    """Copy the arrays into a flat vector."""
    for array, where in zip(arrays, slices, strict=True):
        out[where] = array.reshape(-1)


def scatter(vector: Array, slices: list[slice], variables: list[Any]) -> list[Array]:
    """Cut a flat vector into views of the variables' shapes."""
    return [vector[where].reshape(tuple(v.shape)) for where, v in zip(slices, variables, strict=True)]
