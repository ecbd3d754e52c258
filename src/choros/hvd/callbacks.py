"""Horovod's callbacks for Keras 3, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.argument_checks import check_flag, check_path, check_whole
from choros.backends.host_values import host_value, to_host
from choros.backends.metric_additivity import single_metrics
from choros.comm.collectives import SUM
from choros.errors import InvalidInputError
from choros.hvd.callback_guards import mean_logs
from choros.hvd.collectives import broadcast_variables
from choros.hvd.context import collectives, rank, size
from choros.hvd.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from choros.hvd.lr_callbacks import LearningRateScheduleCallback, LearningRateWarmupCallback
from choros.hvd.model_state import state_of
from choros.hvd.profiling import ProfileCallback
from choros.hvd.split_step import SplitStep, built
from choros.hvd.unused_arguments import ON_HOST, warn_of_unused
from choros.object_text import call_text, value_text

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ProfileCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that broadcasts the root's weights and optimizer state to all ranks before the first step.

    Random layers keep the seeds of their rank. (Horovod broadcasts after the first step, so each rank makes that step
    from different weights. Here this happens only if TensorFlow builds the model in a custom training loop.)

    Args:
        root_rank: int. The rank that sends its values.
        device: without effect, with a warning.
        local_variables: variables that are not broadcast.

    Example:
        >>> BroadcastGlobalVariablesCallback(0).root_rank
        0
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        warn_of_unused("callbacks.BroadcastGlobalVariablesCallback", ON_HOST, device=device)
        self.root_rank = check_whole("root_rank", root_rank, 0)
        if local_variables is not None and not isinstance(local_variables, list | tuple):
            raise InvalidInputError(f"local_variables={value_text(local_variables)}: give a list of variables.")
        self._local = list(local_variables or [])
        self._waiting = False

    def __repr__(self) -> str:
        names = [getattr(variable, "path", variable) for variable in self._local]
        return call_text(self, self.root_rank, local_variables=names or None)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast if the model is built; else broadcast as soon as it is."""
        self._waiting = not built(self.model)
        if not self._waiting:
            self._broadcast()
        elif isinstance(self.model.train_function, SplitStep):
            self.model.train_function.before.append(self._broadcast)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast if the first step has just built the model."""
        if self._waiting:
            self._broadcast()

    def _broadcast(self) -> None:
        self._waiting = False
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        local_ids = {id(v) for v in self._local}
        broadcast_variables([v for v in state_of(self.model) if id(v) not in local_ids], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that gives History and all later callbacks the metrics over all ranks' data.

    It applies to the metrics of training and of validation.

    Args:
        device: without effect, with a warning.
        weighted: bool. True (default): the metrics' variables are summed over the ranks. Each metric then equals that
            of one process on all data, also AUC, and also with unequal rows. Metric classes from outside of Keras, and
            entries that callbacks add to the logs, get the unweighted mean. False: the unweighted mean of all, as in
            Horovod.
    """

    def __init__(self, device: str = "", weighted: bool = True) -> None:
        super().__init__()
        warn_of_unused("callbacks.MetricAverageCallback", ON_HOST, device=device)
        self.weighted = check_flag("weighted", weighted)
        self._plain: Callable[[Any], Any] | None = None
        self._exact: set[str] = set()

    def __repr__(self) -> str:
        return call_text(self, weighted=self.weighted)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Replace the model's method that returns an epoch's results to Keras."""
        if self.weighted and size() > 1:
            self._plain = self.model._get_metrics_result_or_logs
            attributes: dict[str, Any] = self.model.__dict__
            attributes["_get_metrics_result_or_logs"] = self._results

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the model's method."""
        if self._plain is not None:
            attributes: dict[str, Any] = self.model.__dict__
            attributes["_get_metrics_result_or_logs"] = self._plain
            if getattr(self._plain, "__func__", None) is type(self.model)._get_metrics_result_or_logs:
                del attributes["_get_metrics_result_or_logs"]
            self._plain = None

    def _results(self, logs: dict[str, Any] | None) -> Any:
        assert self._plain is not None  # noqa: S101 - for the type checker
        plain_logs = self._plain(logs)
        model = self.model
        if set(plain_logs) != set(model.get_metrics_result()):  # a custom step that logs other values than the metrics
            return plain_logs
        metric_variables = [v for metric in model.metrics for v in metric.variables]
        before = to_host(metric_variables)
        calls = collectives()
        foreign_metrics = [m for metric in model.metrics for m in single_metrics(metric) if _is_foreign(m)]
        foreign = {id(v) for m in foreign_metrics for v in m.variables}
        for i, (variable, value) in enumerate(zip(metric_variables, before, strict=True)):
            if id(variable) not in foreign:
                variable.assign(calls.allreduce(value, SUM, name=f"metric {i} {variable.path}"))
        exact = {name: host_value(v).tolist() for name, v in model.get_metrics_result().items()}
        for variable, value in zip(metric_variables, before, strict=True):
            variable.assign(value)
        if foreign:
            names = {m.name for m in foreign_metrics}
            local = {name: value for name, value in exact.items() if name in names}
            exact |= mean_logs(local, calls, "metrics that do not add")
        self._exact |= set(exact)
        return exact

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the entries that were not summed exactly before."""
        if logs is None or size() == 1:
            return
        exact = {*self._exact, *(f"val_{name}" for name in self._exact)} if self._plain is not None else set()
        logs.update(
            mean_logs({k: v for k, v in logs.items() if k not in exact}, collectives(), f"logs of epoch {epoch}")
        )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras' ``ModelCheckpoint`` with ``save_best_only=True``, which writes on rank 0 only.

    Args:
        monitor: str. Defaults to "val_loss".
        verbose: int. Defaults to 0.
        mode: "auto" (default), "min" or "max".
        save_freq: "epoch" (default) or int, a number of batches.
        save_weights_only: bool. Defaults to False.
        filepath: str. The file to write; may be set as an attribute until training begins.

    Raises:
        ValueError: no ``filepath`` when training begins.
    """

    guarded = True

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
        filepath: str | None = None,
    ) -> None:
        if filepath is not None:
            filepath = check_path("filepath", filepath)
        name = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(
            name,
            monitor,
            verbose,
            True,
            save_weights_only,
            mode,
            save_freq,  # pyright: ignore[reportArgumentType] - a number too; Keras annotates nothing, so str is inferred
        )
        self._has_path, self._mode = filepath is not None, mode

    def __repr__(self) -> str:
        return call_text(
            self,
            monitor=self.monitor,
            mode=self._mode,
            save_freq=self.save_freq,
            save_weights_only=self.save_weights_only,
            filepath=self.filepath if self._has_path else None,
        )

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "filepath":
            self._has_path = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that a path is set."""
        if not self._has_path:
            raise ValueError("BestModelCheckpoint has no path: give filepath='best.keras'.")
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: object, logs: dict[str, Any] | None) -> None:
        if rank() == 0:
            super()._save_model(epoch, batch, logs)


def _is_foreign(metric: keras.Metric) -> bool:
    return not type(metric).__module__.startswith("keras.")
