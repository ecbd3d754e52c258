"""The additions to ``fit`` of a model with a distributed optimizer: the split step, and checks that ranks agree.

``install`` wraps ``make_train_function`` and ``fit`` of ``keras.Model`` once. If the model's optimizer is not
distributed, both wrappers only call the original methods.
"""

from __future__ import annotations

import functools
import inspect
import logging
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from choros.backends import step_counter
from choros.backends.host_values import host_value
from choros.comm.group import kind_of
from choros.consistency import replica_divergence
from choros.consistency.model_fingerprint import alike
from choros.consistency.nonfinite import NonFiniteDetector
from choros.errors import InvalidInputError, RankMismatchError
from choros.hvd.callback_guards import guarded
from choros.hvd.context import collectives, rank
from choros.hvd.fit_consistency import compare
from choros.hvd.gradient_reduction import ReductionConfig
from choros.hvd.rank_shard import Shard
from choros.hvd.split_step import SplitStep, built
from choros.training.spec import WorkerStats
from choros.types import Array

logger = logging.getLogger(__name__)

_announced: list[bool] = []
_installed: list[bool] = []


def reduction_of(optimizer: keras.optimizers.Optimizer | None) -> Any:
    """Return the ReductionConfig of an optimizer, or of the one in a ``LossScaleOptimizer``; None if there is none."""
    reduction = getattr(optimizer, "_choros_reduction", None)
    return reduction or getattr(getattr(optimizer, "inner_optimizer", None), "_choros_reduction", None)


def install() -> None:
    """Wrap ``keras.Model.make_train_function`` and ``fit``; a second call does nothing."""
    if _installed:
        return
    _installed.append(True)
    keras.Model.make_train_function = _make_train_function(keras.Model.make_train_function)
    keras.Model.fit = _fit(keras.Model.fit)


def _make_train_function(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        config: ReductionConfig | None = reduction_of(self.optimizer)
        if config is None or config.idle:
            return plain(self, force)
        if force or not isinstance(self.train_function, SplitStep) or not self.train_function.current:
            self.train_function = SplitStep(self, config)
        return self.train_function

    make_train_function._choros_plain = plain  # type: ignore[attr-defined]
    return make_train_function


def _fit(plain: Callable[..., Any]) -> Callable[..., keras.callbacks.History]:
    names = list(inspect.signature(plain).parameters)

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        config: ReductionConfig | None = reduction_of(getattr(self, "optimizer", None))
        if config is None or collectives(config.process_set).size == 1:
            return plain(self, *args, **kwargs)
        if config.fitting:
            raise InvalidInputError(
                f"fit of the model {self.name!r} was called while fit trains with its optimizer: the ranks would wait "
                "for each other in two loops at once. Call it after fit, or give a model of its own an optimizer of "
                "its own."
            )
        call = dict(zip(names, (self, *args), strict=False)) | kwargs
        compare(self, call, collectives(config.process_set))
        if call.get("verbose", "auto") == "auto" and rank():
            call["verbose"] = 2  # one line per epoch; only rank 0 shows the progress bar
        if isinstance(call.get("x"), Shard):
            call["shuffle"] = False  # a Shard shuffles rows alike on all ranks; Keras would differ between ranks
        if not _announced and not rank():
            _announced.append(True)
            transport = kind_of(collectives(config.process_set).group)
            logger.info(
                f"{config.size} ranks train one model (gradients by {config.op.name.capitalize()}); batch_size is "
                f"per rank, so a step trains {config.size} batches; they communicate by {transport}"
            )
        del call["self"]
        kind = TimedWatch if keras.backend.backend() == "torch" else ConsistencyCallback
        callback, config.fitting = kind(self, config), True
        try:
            call["callbacks"] = guarded(call.get("callbacks"), callback, collectives(config.process_set))
            with pipelines():
                return plain(self, **call)
        finally:
            callback.remove()
            config.fitting = False

    fit._choros_plain = plain  # type: ignore[attr-defined]
    return fit


def pipelines() -> AbstractContextManager[None]:
    """Return the context in which ``fit`` runs; on TensorFlow it turns off the tuning of Keras' data pipelines."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    from choros.hvd.host_ops.tensorflow import untuned_pipelines

    return untuned_pipelines()


class ConsistencyCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that checks that all ranks begin with equal weights and end each epoch at the same step.

    At each epoch's end all ranks take the first rank's learning rate. All ranks stop if one rank's callbacks stop it.

    Args:
        model: keras.Model.
        config: ReductionConfig.

    Raises:
        RankMismatchError: weights or learning rates differ at the start; weights differ at an epoch's end; epochs have
            unequal length; the optimizer made updates from gradients that were not reduced.
    """

    def __init__(self, model: keras.Model, config: ReductionConfig) -> None:
        super().__init__()
        self.config, self._calls = config, collectives(config.process_set)
        self._plain = model._get_metrics_result_or_logs
        self._owner = model
        self.limits: list[Any] = []
        self._epoch_open = self._warned = False
        self._counted = (0, 0)
        stats = WorkerStats(rank(), host=platform.node())
        config.finite = NonFiniteDetector(lambda: stats, config.size, model.optimizer, self._current_weights)
        model.__dict__["_get_metrics_result_or_logs"] = self._results

    def remove(self) -> None:
        """Remove from the model and the reduction what this callback has set."""
        self._owner.__dict__.pop("_get_metrics_result_or_logs", None)
        self.config.finite = None

    def _results(self, logs: dict[str, Any] | None) -> Any:
        """Return the logs; end the epoch with the other ranks at the first call of an epoch.

        Keras calls this when an epoch's batches are over, and again after validation.
        """
        if self._epoch_open:
            self._epoch_open = False
            step = self._owner.train_function
            if isinstance(step, SplitStep) and step.end(self._owner.stop_training):
                self._owner.stop_training = True
                for limit in self.limits:
                    limit.leave_if_asked()  # before validation, while all ranks are at the same step
        return self._plain(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the ranks have ended the epoch's batches before validation."""
        self._check_ended()

    def _check_ended(self) -> None:
        """Raise InvalidInputError if Keras did not get the logs after the epoch's batches: there the ranks end them."""
        if self._epoch_open:
            raise InvalidInputError(
                f"Keras {keras.__version__} did not ask for the logs between an epoch's batches and what follows them, "
                "so the ranks could not end the epoch together: choros.hvd does not work with this version, or with a "
                "fit of the model's own."
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compare the weights; if the model is not built yet, before the first step."""
        step = self._owner.train_function
        if not isinstance(step, SplitStep) and not self.config.idle:
            raise InvalidInputError(
                f"{type(self._owner).__name__} makes a train function of its own (make_train_function), which skips "
                "the reduction of hvd.DistributedOptimizer: override train_step instead, or return what "
                "super().make_train_function() gives."
            )
        if built(self._owner) or not isinstance(step, SplitStep):
            self._compare()
        else:
            step.before.append(self._compare)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the counts of gradients and updates."""
        self._epoch_open = True
        self._counted = self._current_counts()
        self.config.epoch_start = epoch, self.config.taken

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare the counts and the weights of all ranks; apply the stop and the learning rate that callbacks set."""
        self._check_ended()
        taken, updates = (now - then for now, then in zip(self._current_counts(), self._counted, strict=True))
        scaled = hasattr(self._owner.optimizer, "inner_optimizer")  # a LossScaleOptimizer skips non-finite steps
        problem = ""
        if updates > taken or (updates < taken and not scaled):
            problem = f"the optimizer made {updates} updates in this epoch, and {taken} gradients were reduced"
        rate = float(host_value(self._owner.optimizer.learning_rate))
        status = [
            bool(self._owner.stop_training),
            rate,
            problem,
            replica_divergence.mark(self._weights()),
            platform.node(),
        ]
        reports = self._calls.allgather_object(status, name=f"end of epoch {epoch}")
        problems = [f"rank {r}: {problem}" for r, (_, _, problem, *_) in enumerate(reports) if problem]
        if problems:
            raise RankMismatchError(
                f"{'; '.join(problems)}. Something calls the optimizer past hvd.DistributedOptimizer: use "
                "optimizer.apply, and no make_train_function of your own."
            )
        drift = replica_divergence.compare([report[3] for report in reports])
        if drift is not None and drift.far:
            raise RankMismatchError(drift.say([report[4] for report in reports], epoch))
        if drift is not None and not (self._warned or self._calls.rank):
            replica_divergence.warn(drift, "each rank keeps its own")
        self._warned = self._warned or drift is not None
        self._owner.stop_training = any(report[0] for report in reports)
        if any(report[1] != reports[0][1] for report in reports) and isinstance(
            self._owner.optimizer.learning_rate, keras.Variable
        ):
            self._owner.optimizer.learning_rate = reports[0][1]

    def _current_counts(self) -> tuple[int, int]:
        return self.config.taken, self._iterations()

    def _iterations(self) -> int:
        return int(host_value(step_counter(self._owner.optimizer)))

    def _current_weights(self) -> Array:
        """Return the weights of the current step as one vector; the model's variables may be older."""
        step = self._owner.train_function
        return step.weights() if isinstance(step, SplitStep) else self._weights()

    def _weights(self) -> Array:
        """Return the weights that must be equal on all ranks, as one float32 or float64 vector."""
        variables = self._owner.trainable_variables
        local = self.config.are_local(variables)
        shared = [v for v, is_local in zip(variables, local, strict=True) if not is_local]
        flat = np.concatenate([np.zeros(0, "float32"), *(host_value(v).ravel() for v in shared)])
        return flat.astype(np.float64 if flat.dtype == np.float64 else np.float32)

    def _compare(self) -> None:
        rate = float(host_value(self._owner.optimizer.learning_rate))
        flat = np.insert(self._weights(), 0, rate)
        root = self._calls.broadcast(flat, name=f"weights of {alike(self._owner.name)}")
        is_close = bool(np.allclose(flat, root, rtol=1e-3, atol=1e-6, equal_nan=True))
        reports = self._calls.allgather_object([is_close, float(flat[0])], name="whether the weights are equal")
        if any(other != reports[0][1] for _, other in reports):
            rates = ", ".join(f"{other:g}" for _, other in reports)
            raise RankMismatchError(
                f"The ranks begin with different learning rates ({rates}): set the same one on all."
            )
        different = [r for r, (equal, _) in enumerate(reports) if not equal]
        if different:
            raise RankMismatchError(
                f"The weights of ranks {different} are not those of rank 0, so the ranks would train different models: "
                "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks."
            )


class TimedWatch(ConsistencyCallback):
    """ConsistencyCallback for PyTorch, where Keras reads the batches: adds each wait for a batch to the timeline."""

    _wait_began = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the wait for the first batch."""
        super().on_epoch_begin(epoch, logs)
        self._wait_began = time.monotonic_ns()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the wait for the batch in the timeline."""
        if (trace := self._calls.group.trace) is not None:
            trace(("data", "next batch", self._wait_began, time.monotonic_ns(), -1))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the wait for the next batch."""
        self._wait_began = time.monotonic_ns()
