"""The runner of the caller's Keras callbacks, driven by the reports of rank 0, on the model given to the Trainer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from choros.backends import seed_state
from choros.backends.callback_settings import Settings, Values
from choros.backends.driver_model import host_views, kept_values, marks, same_mark
from choros.backends.host_values import to_host
from choros.backends.metrics import slices_of
from choros.backends.optimizers import learning_rates, optimizer_variables
from choros.errors import InvalidInputError, warn
from choros.training.lazy_weights import LazyWeights, holds_tensors
from choros.training.spec import NO_CHANGE, TrainerControl
from choros.training.startup_notice import StartupNotice
from choros.types import Array, same_bits

if TYPE_CHECKING:
    import keras

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_ONLY_WEIGHTS = (
    "Asynchronous workers take only learning rates and weights from callbacks. Set it in on_train_begin or between two "
    "calls of fit, or use a synchronous algorithm (AllReduce, LocalSGD, Averaging ...)."
)


@runtime_checkable
class _EndsProcess(Protocol):
    """A callback that may end this process, such as ``choros.callbacks.BeforeTimeLimit``."""

    at_once: bool


class CallbackRunner:
    """Runner of callbacks in one process. It finds what they change, so that it can be sent to the workers.

    The result of each call is a control message (``TrainerControl``) for the workers.

    Args:
        model: the model given to the Trainer.
        callbacks: the argument of ``fit``: a list, one callback, a ``CallbackList`` or None.
        verbose: 0, 1 or 2, as in Keras.
        epochs, steps: int. As in Keras' ``set_params``; steps may be None.
        first: int. The batch of the first epoch at which training begins.

    Attributes:
        fetch: loads weights into the model before callbacks that may read them: those of the end of the given epoch,
            or the latest for None.
        restore_checkpoint: if training resumes, loads the saved state into the model. Returns whether that state
            includes what callbacks do at the beginning of the epoch. None if training does not resume.
        lazy: LazyWeights of the model.
        synchronous: bool. Whether workers are synchronous. Others take no slots, no settings, and of
            the learning rates only the compiled optimizer's.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | keras.callbacks.CallbackList | None,
        verbose: int,
        epochs: int,
        steps: int | None,
        first: int = 0,
    ) -> None:
        import keras

        self.model = model
        self.fetch: Callable[[int | None], None] = lambda epoch: None
        self.restore_checkpoint: Callable[[], bool] | None = None
        self.sends_model = False  # whether ranks have copies of this process's model
        self.notice: StartupNotice | None = None  # until the first batch
        callback_list = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        callback_list = (
            []
            if callback_list is None
            else list(callback_list)
            if isinstance(callback_list, Sequence)
            else [callback_list]
        )
        self.user = [
            c for c in callback_list if not isinstance(c, (keras.callbacks.History, keras.callbacks.ProgbarLogger))
        ]
        for callback in self.user:
            if isinstance(callback, _EndsProcess):  # only after the workers are done
                callback.at_once = False
        self.list = keras.callbacks.CallbackList(
            callback_list,
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            model=model,
        )
        self.history: Any = model.history
        self.per_batch = any(_wants_batches(callback) for callback in self.user)  # a callback has a batch hook
        base = keras.callbacks.Callback.on_test_begin
        self._swaps = any(
            getattr(type(callback), "on_test_begin", base) is not base
            and not isinstance(callback, (keras.callbacks.SwapEMAWeights, keras.callbacks.TensorBoard))
            for callback in self.user
        )
        # By epoch, logs and metric values of epochs that were reported before an earlier epoch.
        self.waiting: dict[int, tuple[dict[str, float], Sequence[float]]] = {}
        # By ended epoch, the control message: a restarted worker may end the epoch again.
        self.controls: dict[int, TrainerControl] = {}
        self.epoch: int | None = None
        self.epochs, self.steps, self.first, self.synchronous = epochs, steps, first, True
        self._batch_callbacks: list[Any] = []  # called one by one: Keras' list checks whether each number is a tensor
        self.lazy = LazyWeights(model, self._touch)
        self._touched = False  # a callback has used weights in the last watched context
        self._loading = threading.RLock()
        self._load: Callable[[], None] = lambda: None  # loads the weights for the callback
        self._weights_before: list[Array] = []  # once touched, the weights before callbacks could change them
        self._slots: list[Any] = []  # likewise marks of the optimizers' variables
        self._postponed: list[tuple[int, int, dict[str, float]]] = []  # batches of epochs that have not begun
        self._rate_before = 0.0  # the learning rate before callbacks could set it
        self._last_rate: tuple[Any, float] = (None, 0.0)  # the learning rate: the backend's value, and a float
        self._mutable = keras.backend.backend() != "jax"  # the tensor of the rate's variable changes in place
        self._settings: Settings | None = None
        self._loaded_metrics: list[Array] = []  # once touched, the metric variables as loaded for callbacks
        self._scheduled = False  # whether the learning rate was a schedule when training began
        self._trained: list[int] = []  # ids of the trainable variables when training began
        self._compiled: tuple[Any, Any] = (None, None)  # the optimizer and the losses when training began
        self._last_settings: Values = {}  # the settings at the last comparison
        self._glance: list[Any] = []  # likewise the result of ``Settings.glance``, which is faster to compare
        self._all_settings: Values = {}  # all settings that callbacks have changed in this fit, for restarted workers
        self._warned: set[str] = set()  # ignored changes for which a warning was given
        self._may_hold_tensors: list[bool] = []  # for each callback, the result of ``holds_tensors``
        self._eager = False  # whether such a callback has a batch hook
        self.step = -1  # the last batch for which on_train_batch_begin was called
        # The epoch of rank 0's first report. Infinity while an asynchronous rank 0 that resumes has reported nothing.
        self._first_report: float = -1
        self.logs: dict[str, float] = {}

    # -- the calls that Keras' fit would make
    def begin(self, epoch: int) -> TrainerControl:
        """Run the callbacks for the beginning of training and of its first epoch.

        If training resumes, the saved state may already include the changes by these callbacks. Their changes are then
        dropped. After a restart of workers, run no callback, and return the settings sent to workers so far.
        """
        if self._settings is not None:
            return TrainerControl(settings=self._all_settings)
        if self.notice is not None:
            self.notice.ready()
        self.model.stop_training = False
        self._settings, self._scheduled = Settings(self.model), self._has_schedule()
        self._last_settings, self._glance = self._settings.read(), self._settings.glance()
        self._trained = list(map(id, self.model.trainable_variables))
        self._compiled = self.model.optimizer, self.model._compile_loss
        includes_callbacks = self._restore()
        self._inspect_callbacks()
        with self._watched(lambda: None):  # the model has the weights
            self.list.on_train_begin()
            self._inspect_callbacks()
            if epoch < self.epochs:
                self.epoch = epoch
                self.list.on_epoch_begin(epoch)
                # An asynchronous rank 0 may resume within this epoch or a later one. Its first report has the number of
                # its batch.
                if includes_callbacks and not self.synchronous:
                    self._first_report = math.inf
                else:
                    self._begin_batch(self.first)
        # Once more: the callbacks above have run again, and the saved state already includes what they change.
        restored = includes_callbacks and self._restore()
        control = TrainerControl(bool(self.model.stop_training)) if restored else self._control(started=False)
        self._all_settings = self._settings.to_begin_with(with_globals=self.sends_model) | control.settings
        return replace(self._after_a_batch(control), settings=self._all_settings)

    def _after_a_batch(self, control: TrainerControl) -> TrainerControl:
        """Return a control message that ends synchronous training after the next batch, as Keras does."""
        return replace(control, stop=False, end_after_batch=control.stop) if self.synchronous else control

    def _restore(self) -> bool:
        """If training resumes, load the saved state into the model for the callbacks; see ``restore_checkpoint``."""
        if self.restore_checkpoint is None or not self.user:
            return False
        self.fetch(None)
        return self.restore_checkpoint()

    def batch(self, epoch: int, step: int, logs: dict[str, float]) -> TrainerControl:
        """Run the callbacks for a step of rank 0. The control message applies from the next step on."""
        # Keras makes a bar again at the next batch of its epoch. Without such a batch, the epoch's end would find none.
        if self.notice is not None and epoch == self.epoch:
            self.notice.restart_bars(self.list.callbacks)
            self.notice = None
        if not self.per_batch:
            if epoch == self.epoch:  # an asynchronous worker may already be in the next epoch
                self.list.on_train_batch_end(step, logs)
            return TrainerControl()
        # An asynchronous rank 0 may be in another epoch than the callbacks.
        self._first_report = min(self._first_report, epoch)
        if not self.synchronous and epoch != self.epoch:
            if self.epoch is not None and epoch > self.epoch:
                self._postponed.append((epoch, step, logs))
            return NO_CHANGE
        rate_is_watched = self.lazy.watches_rate
        rate = self._last_rate[1] if rate_is_watched else self._rate()
        with self._watched(partial(self.fetch, None), rate, self._eager):
            self._begin_batch(step)
            self._end_batch(step, logs)
            stop = self.lazy.stopped
            if not stop and (self.steps is None or step + 1 < self.steps):
                self._begin_batch(step + 1)  # as in Keras, this batch is trained even if its begin hook stops training
        is_unchanged = rate_is_watched and not self._touched
        # Loggers read the rate after each batch. On JAX, comparing an unchanged rate reads no array.
        is_unchanged = is_unchanged and (not self.lazy.rate_used or self._rate() == rate)
        if is_unchanged and (self._settings is None or self._settings.glance() == self._glance):
            return TrainerControl(True) if stop else NO_CHANGE
        return replace(self._control(), stop=stop, reset=self._were_reset())

    @contextmanager
    def _watched(
        self, load: Callable[[], None], rate: float | None = None, eager: bool | None = None
    ) -> Iterator[None]:
        """Run hooks within this context. Before a callback uses weights, load and copy them.

        Args:
            load: loads the weights into the model.
            rate: the learning rate now. None reads it.
            eager: whether to load them at once. By default as the callbacks' attributes require.
        """
        self._touched, self._weights_before, self._slots, self._loaded_metrics, self._load = False, [], [], [], load
        if not self.user:
            yield
            return
        self._rate_before = self._rate() if rate is None else rate
        if any(self._may_hold_tensors) if eager is None else eager:
            self._touch()
        self.lazy.arm()
        try:
            yield
        finally:
            with self._loading:  # a thread of a callback may be loading them
                self.lazy.rest()

    def _touch(self) -> None:
        """Load the weights for a callback that is about to use them, and copy them for a later comparison."""
        with self._loading:
            if self._touched:
                return
            rate = self._rate()
            self._load()
            if rate != self._rate_before and not self._has_schedule():  # keep a rate that an earlier callback has set
                self.model.optimizer.learning_rate = rate
            self._weights_before = kept_values(self._weights())
            self._slots = self._marks()
            self._touched = True

    def _inspect_callbacks(self) -> None:
        """Find the callbacks with batch hooks, and those that may reach weights past the model's objects."""
        if not self.user:
            return
        is_inside = self.lazy.inside
        self.lazy.collect()
        self._may_hold_tensors = [holds_tensors(callback, self.model) for callback in self.user]
        have_batch_hooks = [_wants_batches(callback) for callback in self.user]
        self._batch_callbacks = [callback for callback in self.list.callbacks if _wants_batches(callback)]
        # Such a callback may read weights in each batch unnoticed, so the weights must be loaded before its hooks.
        self._eager = any(
            may_hold and has_hook for may_hold, has_hook in zip(self._may_hold_tensors, have_batch_hooks, strict=True)
        )
        if is_inside:
            if any(self._may_hold_tensors):
                self._touch()
            self.lazy.arm()

    def _begin_batch(self, step: int) -> None:
        if self.per_batch and step != self.step:
            for callback in self._batch_callbacks:
                callback.on_train_batch_begin(step, logs={})
        self.step = step

    def _end_batch(self, step: int, logs: dict[str, float]) -> None:
        if not set(map(type, logs.values())) <= {float}:
            self.list.on_train_batch_end(step, _arrays(logs))
            return
        logs = dict(sorted(logs.items()))  # Keras' order
        for callback in self._batch_callbacks:
            callback.on_train_batch_end(step, logs=logs)

    def show_metrics(self, values: Sequence[float]) -> None:
        """Set the variables of the model's metrics for callbacks, from a flat list of their values."""
        variables = self.model.metrics_variables
        slices = slices_of(variables)
        # ``values`` is empty if there are too many values; the length differs if the model was compiled again.
        if not values or slices[-1].stop != len(values):
            return
        flat = np.array(values)
        for variable, where in zip(variables, slices, strict=True):
            variable.assign(flat[where].reshape(tuple(variable.shape)).astype(variable.dtype))
        self._loaded_metrics = to_host(variables)

    def _were_reset(self) -> bool:
        """Return whether a callback of a batch has reset all metrics after they were loaded for it.

        Warn of other changes to metrics, which workers ignore.
        """
        values = to_host(self.model.metrics_variables)
        if not self._loaded_metrics or _equal(values, self._loaded_metrics):
            return False
        self.model.reset_metrics()
        all_reset = _equal(values, to_host(self.model.metrics_variables))
        if not all_reset:
            self._warn_ignored(
                "metrics",
                "Workers take only model.reset_metrics(), of all metrics, after a batch of a synchronous fit.",
            )
        return all_reset

    def epoch_end(self, epoch: int, logs: dict[str, float], metric_values: Sequence[float] = ()) -> TrainerControl:
        """Run the callbacks for the end of an epoch. The control message applies from the next epoch on.

        An epoch that is reported before an earlier one waits for it. If workers were restarted and an epoch ends
        again, run no callback, and return the control message of the first time.

        Args:
            epoch: int. The epoch that has ended.
            logs: its logs.
            metric_values: the values of the metrics' variables at its end, flat.
        """
        if epoch in self.controls:
            return self.controls[epoch]
        self.waiting[epoch] = logs, metric_values
        control = TrainerControl()
        while self.epoch is not None and self.epoch in self.waiting:
            ended = self.epoch
            control = control.then(self._run_epoch_end(ended, *self.waiting.pop(ended))).then(self._run_postponed())
            self.controls[ended] = control
        return control

    def _run_postponed(self) -> TrainerControl:
        """Run the callbacks of batches that were reported before their epoch had begun."""
        batches, self._postponed = self._postponed, []
        control = TrainerControl()
        for epoch, step, logs in batches:
            control = control.then(self.batch(epoch, step, logs))
        return control

    def _run_epoch_end(self, epoch: int, logs: dict[str, float], metric_values: Sequence[float]) -> TrainerControl:
        self.logs = logs = _arrays(logs)

        next_begun = False

        def load() -> None:
            self.fetch(epoch)
            if next_begun:  # Keras resets the metrics before on_epoch_begin
                self.model.reset_metrics()
            else:
                self.show_metrics(metric_values)

        with self._watched(load):
            if any(name.startswith("val_") for name in logs):
                self.list.on_test_begin()
                if self._swaps and self._touched and any(self._changed()):
                    self._warn_ignored(
                        "weights in on_test_begin",
                        "Workers have validated already, with the weights of the epoch's end. For a moving average use "
                        "the optimizer's use_ema with keras.callbacks.SwapEMAWeights, or evaluate in on_epoch_end.",
                    )
                self.list.on_test_end({name[4:]: value for name, value in logs.items() if name.startswith("val_")})
            self.list.on_epoch_end(epoch, dict(logs))
            self._inspect_callbacks()
            self.epoch = epoch + 1 if epoch + 1 < self.epochs else None
            stopped = self.lazy.stopped
            if stopped:
                self.epoch = None
            if self.epoch is not None:
                if self._touched:
                    self.model.reset_metrics()
                next_begun = True
                self.step = -1  # the epoch that has ended may have had batch 0 only
                self.list.on_epoch_begin(self.epoch)
                if self._first_report < self.epoch:
                    self._begin_batch(0)
        control = self._control()
        return control if stopped else replace(control, stop=False) if self.per_batch else self._after_a_batch(control)

    def end(self) -> None:
        """Run the callbacks for the end of training. The model must hold the final weights."""
        self.lazy.disarm()
        self.list.on_train_end(self.logs)

    # -- changes by callbacks
    def _weights(self) -> list[Any]:
        """Return the variables that count as weights.

        Optimizer slots and the states of random layers do not count: a callback that draws random numbers changes no
        weight. The learning rates of further optimizers, which the model holds beside the compiled one, count.
        """
        left_out = {id(variable) for variable in [*seed_state.find(self.model), *optimizer_variables(self.model)]}
        rates = learning_rates(self.model)
        return [*(variable for variable in self.model.variables if id(variable) not in left_out), *rates]

    def _changed(self) -> list[bool]:
        """Return whether each of the variables that count as weights has changed since they were loaded."""
        views = host_views(self._weights())
        return [not same_bits(old, new) for old, new in zip(self._weights_before, views, strict=True)]

    def _changed_settings(self) -> Values:
        """Return the settings that callbacks have changed since the last call."""
        if self._settings is None:
            return {}
        changed = self._settings.changed(self._last_settings)
        self._last_settings |= changed
        self._glance = self._settings.glance()
        return changed

    def _marks(self) -> list[Any]:
        """Return marks of the optimizers' variables, to find later which ones a callback has set.

        Return none if there is a SwapEMAWeights callback, which swaps the averages in them with the weights.
        """
        import keras

        if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in self.user):
            return []
        return marks(optimizer_variables(self.model))

    def _set_slots(self) -> list[int]:
        """Return the indices of the optimizers' variables that a callback has set, without learning rates."""
        old_marks, self._slots = self._slots, []
        if not old_marks:
            return []
        variables = optimizer_variables(self.model)
        return [
            index
            for index, (variable, old, new) in enumerate(zip(variables, old_marks, marks(variables), strict=False))
            if variable.path.rpartition("/")[2] != "learning_rate" and not same_mark(old, new)
        ]

    def _warn_ignored(self, change: str, remedy: str) -> None:
        """Warn, once for each ``change``, that workers ignore a value that a callback has set."""
        if change not in self._warned:
            self._warned.add(change)
            warn(f"A callback has set {change}, which has no effect on the workers. {remedy}")

    def _rate(self) -> float:
        if not self.user:
            return 0.0
        rate = self.model.optimizer.learning_rate
        value = getattr(rate, "value", rate)
        if value is not self._last_rate[0] or self._mutable:  # reading at every batch would be slow
            self._last_rate = (value, float(to_host([rate])[0]))
        return self._last_rate[1]

    def _has_schedule(self) -> bool:
        """Return whether the learning rate follows a schedule now; a callback may have set one."""
        import keras

        return not isinstance(self.model.optimizer.learning_rate, keras.Variable)

    def _control(self, started: bool = True) -> TrainerControl:
        """Return what callbacks have changed in the last watched context."""
        stop = bool(self.model.stop_training)
        if not self.user:
            return TrainerControl(stop)
        optimizer, losses = self._compiled
        # Workers have compiled their steps with the optimizer and the losses of the beginning.
        if self.model.optimizer is not optimizer or self.model._compile_loss is not losses:
            raise InvalidInputError(
                "A callback has replaced the optimizer or compiled the model again, which does not reach the "
                "workers: end this fit, compile, and call fit again."
            )
        settings, slots = self._changed_settings(), self._set_slots()
        if list(map(id, self.model.trainable_variables)) != self._trained:
            raise InvalidInputError(
                "A callback has changed which variables are trained (trainable = ...), which does not reach the "
                "workers: end this fit, set it, compile, and call fit again."
            )
        if self._settings is not None and (functions := self._settings.replaced_functions()):
            self._warn_ignored(_names(functions), "Set functions before fit.")
        if started and not self.synchronous and (slots or settings):
            paths = [optimizer_variables(self.model)[index].path for index in slots]
            self._warn_ignored(_names([*paths, *settings]), _ONLY_WEIGHTS)
            settings, slots = {}, []
        self._all_settings |= settings
        rate = self._rate()
        scheduled = self._has_schedule()
        if scheduled and not self._scheduled:
            raise InvalidInputError(
                "A callback has replaced the learning rate by a schedule, which does not reach the workers: give the "
                "optimizer the schedule before fit, or set a number (LearningRateScheduler)."
            )
        is_new = rate != self._rate_before and math.isfinite(rate) and not scheduled
        control = TrainerControl(stop, rate if is_new else None, slots=slots, settings=settings)
        if not self._touched:
            return control
        changed = self._changed()
        rate_count = len(learning_rates(self.model))
        if rate_count and started and not self.synchronous and any(changed[-rate_count:]):
            raise InvalidInputError(
                "A callback has set the learning rate of a second optimizer, which does not reach asynchronous "
                "workers: give that optimizer a schedule, or use a synchronous algorithm (LocalSGD, Averaging ...)."
            )
        return replace(control, weights=any(changed))


def _equal(left: Sequence[Array], right: Sequence[Array]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3]))


def _arrays(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs with lists converted to float32 arrays: Keras logs a metric of several values as an array."""
    return {name: np.array(value, np.float32) if isinstance(value, list) else value for name, value in logs.items()}


def _wants_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback uses a batch hook. Some callbacks of Keras do so only with some settings."""
    import keras

    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    base = keras.callbacks.Callback
    return any(
        getattr(type(callback), hook, None) is not getattr(base, hook) or hook in vars(callback)
        for hook in _BATCH_HOOKS
    )
