"""The code that the replicas of all three backends share: flat vectors, exact loss, seeds, learning rate.

A backend implements the abstract methods of ``BaseReplica``. They read and write variables, compute gradients, run
the optimizer and evaluate a batch.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from choros.backends import averages_of, seed_state, step_counter
from choros.backends.batch_parts import blind, parts
from choros.backends.callback_settings import Settings
from choros.backends.encoded_inputs import as_keras_input
from choros.backends.gradient_capture import Capture
from choros.backends.gradient_presence import keep, leave_out, left_out
from choros.backends.loss_exactness import mixed_rows
from choros.backends.loss_weighting import LossWeightTracker
from choros.backends.metrics import LossSample, Metrics, gather, scatter, slices_of
from choros.backends.optimizers import build_held, model_variables, optimizer_variables, unbuilt_refused
from choros.backends.step_windows import SingleSteps
from choros.backends.variable_groups import large_frozen, moving_statistics, vector_dtype
from choros.cluster.hardware.array_threads import with_number
from choros.types import Array, Batch

if TYPE_CHECKING:
    from choros.backends.optimizer_shard.shard import OptimizerShard

Mark = tuple[list[Any], list[Array], tuple[Any, ...]]


class BaseReplica(SingleSteps, Metrics):
    """One worker's compiled model. ``choros.backends.replica.Replica`` documents the methods.

    Args:
        model: a compiled ``keras.Model``.
        workers: int. Number of workers that train. With more than one, a loss that cannot be exact is refused.
    """

    _capture: Capture | None = None  # set on PyTorch and TensorFlow
    shard: OptimizerShard | None = None  # set while the ranks of a host divide the optimizer's update
    idle_shard: OptimizerShard | None = None  # that of the last fit (JAX, TensorFlow)

    def __init__(self, model: keras.Model, workers: int = 1) -> None:
        self.model = model
        self.workers = workers
        self.blind = False  # built without y: only prediction is possible
        self.revocable = self.repeats = self.watches = False
        self._total = 0
        self.packing = 0.0
        self._batch: tuple[Any, ...] | None = None  # the packed batch of the last gradients, if ``repeats`` is set
        self._refusing = ExitStack()
        self._lay_out()

    def renew(self, arrays: list[Array]) -> None:
        """Replace ``build`` for a further fit of the same model: set the values that ``snapshot`` returns."""
        self.revocable = self.repeats = self.watches = False
        self._total, self._batch, self.packing = 0, None, 0.0
        self._refusing.enter_context(unbuilt_refused(self.model))
        self._load(arrays)
        self.reset_metrics()

    def _load(self, arrays: list[Array]) -> None:
        """Set all variables of the model and its optimizers before a further fit."""
        self.restore(arrays)

    @property
    def reusable(self) -> bool:
        """True if another fit of an equal model may use this replica, after ``finish``, with its compiled steps."""
        return False

    # The methods that a backend implements, besides _values and _assign.

    @abstractmethod
    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        """Run ``train_step`` with its optimizer on the packed batch; return ``self._custom(logs)``."""

    @abstractmethod
    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], LossSample, float]:
        """Run ``train_step`` without the optimizer's update.

        The loss metric's variables keep their values. ``self._logs`` is set to ``self._custom(logs)``.

        Returns:
            The gradients in the order of ``trainable`` (None: no gradient), the contribution to the loss metric, and
            the divisor of the loss.
        """

    def attempt(self, data: tuple[Any, ...], rows: int, afresh: bool) -> tuple[list[Array | None], float]:
        """Run ``train_step`` once for a trial, without the optimizer: return its gradients and the loss's divisor.

        The step may change variables, except on JAX. With ``afresh`` the step is traced again, because its meaning
        has changed.
        """
        arrays, _, n = self._gradients(data, rows)
        return arrays, n

    def left(self, data: tuple[Any, ...], rows: int, shifts: list[float]) -> tuple[list[Array], dict[str, Any]]:
        """Return the values of the ``left_in`` variables after ``train_step``, and its logs; then restore the state.

        A stand-in replaces the optimizer.

        Args:
            data: a packed batch.
            rows: int. Number of rows of the batch.
            shifts: one number for each trainable variable. The stand-in adds it to the variable. If any is not 0, the
                stand-in also increments the step counter.
        """
        assert self._capture is not None  # noqa: S101 - for the type checker
        variables = [*self.left_in(), step_counter(self.model.optimizer)]
        before, generators = [np.array(value) for value in self._values(variables)], self.generators()
        self._capture.shifts = shifts
        try:
            self.attempt(data, rows, True)
            return [np.array(value) for value in self._values(self.left_in())], dict(self._logs or {})
        finally:
            self._capture.shifts = []
            self._assign(variables, before)
            self.set_generators(generators)

    def structure(self, data: tuple[Any, ...], rows: int) -> str | None:
        """Search the traced program of a step for a value that depends on the optimizer's update.

        All branches of a condition are searched, also branches that are rarely taken.

        Args:
            data: a packed batch.
            rows: int. Number of rows of the batch.

        Returns:
            The name of a value that depends on the update; "" if there is none; None if the program does not show it.
        """
        return None

    def left_in(self) -> list[Any]:
        """Return the variables that a step may set: trainable, non-trainable and metric variables."""
        return [*self.trainable, *self.model.non_trainable_variables, *self.metric_variables]

    @abstractmethod
    def _apply(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """Run the compiled optimizer on ``gradient / divisor``; the caller may reuse ``gradient`` after the return.

        ``absent`` holds the indices of the variables without a gradient on every rank. The optimizer gets for them
        what plain Keras passes on this backend: None, or zeros on JAX.
        """

    @abstractmethod
    def _repeat(self, data: tuple[Any, ...], gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """Run ``train_step`` again, with ``gradient / divisor`` as the input of the optimizer."""

    @abstractmethod
    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[LossSample, float]:
        """Run ``test_step``; return the contribution to the loss metric, which keeps its values, and the divisor."""

    @abstractmethod
    def _predict(self, data: tuple[Any, ...]) -> Any:
        """Run ``predict_step``; return the model's outputs."""

    @abstractmethod
    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step. The first call, before any step, switches it on."""

    @abstractmethod
    def _settle(self) -> None:
        """Move from the look-ahead point to x, and copy all state into the Keras model."""

    def _built(self) -> None:
        """Read the model's state, after ``build`` and ``finish``."""

    # The layout of the flat vectors.

    def _lay_out(self) -> None:
        self.trainable: list[Any] = list(self.model.trainable_variables)
        self.moving: list[Any] = moving_statistics(self.model)
        self.seeds: list[Any] = seed_state.find(self.model)
        self.slices = slices_of(self.trainable)
        self.moving_slices = slices_of(self.moving)
        self.size = self.slices[-1].stop if self.slices else 0
        self.statistics_size = self.moving_slices[-1].stop if self.moving_slices else 0
        self.dtype = vector_dtype(self.trainable)

    def build(self, batch: Batch) -> None:
        """Create the variables that the first ``fit`` creates, from one batch that has rows."""
        data = self.pack(batch)
        with blind(self.model, batch) as self.blind:
            inputs = keras.tree.map_structure(as_keras_input, data)
            self.model._symbolic_build(data_batch=inputs)
            build_held(self.model, inputs)
            self._lay_out()
            self._refusing.enter_context(unbuilt_refused(self.model))
            self.weigher = LossWeightTracker(self.model, self.workers)
            if self.workers > 1:
                self.weigher.refuse(mixed_rows(self.model, data))
            self._take_metrics()
            self._built()
            self.reset_metrics()

    def attach(self) -> None:
        """Replace ``build`` for a built model that Keras' loop trains with ``half_step`` and ``update``."""
        self.within_fit = True
        self._lay_out()
        self.weigher = LossWeightTracker(self.model)
        self._take_metrics()
        self._built()

    def half_step(self, data: tuple[Any, ...]) -> tuple[list[Array | None], float, dict[str, Any]]:
        """Run ``train_step`` up to the optimizer, on a batch from Keras' loop.

        Returns:
            The gradients in the order of ``trainable`` (None: no gradient), the divisor of the loss, and the logs.
        """
        rows = int(keras.tree.flatten(data)[0].shape[0])
        with self._repeatable(data):
            arrays, _, n = self._gradients(data, rows)
        return arrays, n, self._logs or {}

    def update(self, gradient: Array, divisor: float) -> dict[str, Any] | None:
        """Run the optimizer on ``gradient / divisor``; return the step's logs if ``repeats`` is set, else None."""
        self._make_update(gradient, divisor, left_out(gradient, self.slices))
        return (self._logs or {}) if self.repeats else None

    @property
    def lead(self) -> BaseReplica:
        """The replica itself, as it has a single model."""
        return self

    def on_lead(self, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Call the function with the batch."""
        return function(batch)

    def skip(self) -> None:
        """Increment the step counter, without an update."""
        self.iterations += 1

    def pack(self, batch: Batch) -> tuple[Any, ...]:
        """Return ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` as ``fit`` passes them to a step.

        Floats of more than 16 bits are cast to Keras' floatx.
        """
        if batch.packed is not None:
            return batch.packed  # type: ignore[no-any-return]  # a ShardedBatch has the number of its rows
        floatx = keras.config.floatx()

        def leaf(array: Any) -> Any:
            if array is not None and array.dtype.kind == "f" and array.dtype != floatx and array.dtype.itemsize > 2:
                array = array.astype(floatx)
            return self._leaf(array)

        data = parts(batch)
        if all(isinstance(part, np.ndarray) for part in data):  # avoids the cost of a tree traversal for each batch
            return tuple(leaf(part) for part in data)
        return tuple(keras.tree.map_structure(leaf, part) for part in data)

    def _packed(self, batch: Batch) -> tuple[Any, ...]:
        """Return ``pack(batch)`` and count its seconds."""
        begun = time.perf_counter()
        data = self.pack(batch)
        self.packing += time.perf_counter() - begun
        return data

    def _leaf(self, array: Any) -> Any:
        """Convert one array of a batch to the input type of the backend's step."""
        return array

    def ready(self, batch: Batch) -> Batch:
        """Return the batch, packed and placed on the device."""
        return replace(batch, packed=self._placed(self.pack(batch))) if batch.rows else batch

    def _placed(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy a packed batch to the device, if packing has not done so."""
        return data

    # Training.

    def step(self, batch: Batch) -> None:
        """Run one local training step; a batch without rows is skipped."""
        if batch.rows:
            self._logs = self._step(self._packed(batch))
            self._rows += batch.rows

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out``; zeros for a batch without rows."""
        self._total, self._batch = batch.total, None
        if not batch.rows:
            out[:] = 0
            for where in self.slices:
                leave_out(out, where)
            return
        data = self._packed(batch)
        with self._scaled(batch) as share, self._repeatable(data):
            arrays, reported, n = self._gradients(data, batch.rows)
        self._rows += batch.rows
        loss = self._known(reported, batch.rows)
        for where, array in zip(self.slices, arrays, strict=True):
            if array is None:
                leave_out(out, where)
            else:
                with_number(np.multiply, array.reshape(-1), n / share, out[where])
                keep(out, where)
        out[-2] = n * loss
        out[-1] = n

    @contextmanager
    def _scaled(self, batch: Batch) -> Iterator[float]:
        """Temporarily scale a float16 loss by this rank's share of the rows, and yield that share.

        The caller divides the gradients by the share. If the loss is a mean, the gradient of one row is inversely
        proportional to the number of rows. With the share, float16 gradients therefore overflow at the same loss scale
        as in one process with the global batch.
        """
        scale = getattr(self.model.optimizer, "dynamic_scale", None)
        share = batch.rows / max(batch.total, batch.rows)
        if scale is None or share == 1.0 or self.weigher.sums:
            yield 1.0
            return
        before = np.array(self._values([scale])[0])
        self._assign([scale], [before * share])
        try:
            yield share
        finally:
            self._assign([scale], [before])

    def apply(self, summed: Array) -> None:
        """Divide the summed gradient by its last element and run the optimizer. ``summed`` may be reused afterwards."""
        divisor = self.count_batch(summed[-2:])
        if divisor and self.trainable:
            self._make_update(summed[:-2], divisor, left_out(summed, self.slices))

    def count_batch(self, totals: Array) -> float:
        """Add the exact loss of a batch, of ``[n * loss, n]``; return the gradients' divisor, 0 without rows."""
        divisor = 1.0 if self.weigher.sums else float(totals[1])
        if divisor:
            self._count(float(totals[0]) / divisor, self._total)
        return divisor

    @contextmanager
    def _repeatable(self, data: tuple[Any, ...]) -> Iterator[None]:
        """Save the batch of a step that is repeated, and restore the variables that the step has changed."""
        if not self.repeats:
            yield
            return
        values, generators = self._marked(), self.generators()
        yield
        self._go_to(values)
        self.set_generators(generators)
        self._batch = data

    def _make_update(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """Run the optimizer, or run the saved step again with it. A rank without rows has no saved step."""
        batch, self._batch = self._batch, None
        if batch is None:
            self._apply(gradient, divisor, absent)
        else:
            self._repeat(batch, gradient, divisor, absent)

    def outcome(self) -> list[Array]:
        """Return copies of the variables that a repeated step makes equal on all ranks.

        These are all variables of the model except seed states and large frozen weights.
        """
        return [np.array(value) for value in self._values(self._alike())]

    def set_outcome(self, arrays: list[Array]) -> None:
        """Set the values that ``outcome`` returned on another rank."""
        self._assign(self._alike(), arrays)

    def _alike(self) -> list[Any]:
        skipped = {id(v) for v in (*self.seeds, *large_frozen(self.model))}
        return [*self.trainable, *(v for v in self.model.non_trainable_variables if id(v) not in skipped)]

    def evaluate(self, batch: Batch) -> None:
        """Run one test step: update the metrics and add one row to the losses of batches."""
        entry = (0.0, 0.0, 0.0)
        if batch.rows:
            reported, n = self._evaluate(self.pack(batch), batch.rows)
            self._rows += batch.rows
            loss = self._known(reported, batch.rows)
            entry = (n * loss, n, float(batch.rows))
        self._batch_losses.append(np.array(entry))

    def predict(self, batch: Batch) -> list[Any]:
        """Return a list with the model's outputs for ``x`` as nested arrays; empty for a batch without rows."""
        if not batch.rows:
            return []
        outputs = self._predict(self.pack(Batch(batch.x, None, None, batch.rows, batch.total)))
        return [keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)]

    # A step that may be undone.

    def mark(self) -> Mark:
        """Return the current values of the state that ``gradients`` changes."""
        return self._marked(), self.generators(), self._facts()

    def _facts(self) -> tuple[Any, ...]:
        return self._rows, self._logs, dict(self._scalars), self._step_logs_loss, self._by_batch, self._total

    def swap(self, mark: Mark) -> Mark:
        """Restore the state of a mark; return a mark of the state that it replaces."""
        restorable = self._copied(), self.generators(), self._facts()
        values, generators, facts = mark
        self._go_to(values)
        self.set_generators(generators)
        self._rows, self._logs, self._scalars, self._step_logs_loss, self._by_batch, self._total = facts
        return restorable

    def _marked(self) -> list[Any]:
        """Return the values of the variables that ``gradients`` changes. TensorFlow fills the list in the next call."""
        return self._copied()

    def _copied(self) -> list[Any]:
        """Return copies of the variables that ``gradients`` changes."""
        return [np.array(value) for value in self._values(self._changing())]

    def _go_to(self, values: list[Any]) -> None:
        """Set the variables that ``gradients`` changes to values of ``_marked`` or ``_copied``."""
        self._assign(self._changing(), values)

    def _changing(self) -> list[Any]:
        weights = self.trainable if self.repeats else []  # a repeated step may set weights: both runs start alike
        return [*weights, *self.model.non_trainable_variables, *self.metric_variables]

    # Vectors.

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out``. With look-ahead momentum, copy x."""
        gather(self._x_values(), self.slices, out)

    def _x_values(self) -> list[Array]:
        """Return the values of the trainable variables (x, with look-ahead momentum), without a copy if possible."""
        return self._values(self.trainable)

    def set(self, vector: Array) -> None:
        """Set the trainable variables to a copy of the vector."""
        self._assign(self.trainable, scatter(vector, self.slices, self.trainable))

    def get_statistics(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""
        gather(self._values(self.moving), self.moving_slices, out)

    def set_statistics(self, vector: Array) -> None:
        """Set the moving statistics to a copy of the vector."""
        self._assign(self.moving, scatter(vector, self.moving_slices, self.moving))

    # The optimizer's state.

    @property
    def averages(self) -> bool:
        """True if the optimizer keeps moving averages of the weights (``use_ema``)."""
        return bool(averages_of(self.model.optimizer))

    def get_average(self, out: Array) -> None:
        """Copy the optimizer's moving averages of the trainable variables into ``out``."""
        gather(self._values(self._averages()), self.slices, out)

    def set_average(self, vector: Array) -> None:
        """Set the moving averages to a copy of the vector. The variables keep their values."""
        values = scatter(vector, self.slices, self.trainable)
        pairs = zip(self._averages(), self.trainable, values, strict=True)
        averaged = [(average, value) for average, variable, value in pairs if average is not variable]
        self._assign([average for average, _ in averaged], [value for _, value in averaged])

    def _averages(self) -> list[Any]:
        """Return the average of each trainable variable, or the variable itself if it has no average."""
        averages = averages_of(self.model.optimizer)
        return [averages.get(id(variable), variable) for variable in self.trainable]

    def optimizer_state(self) -> list[Array]:
        """Return copies of the variables of all optimizers, in the order of ``optimizer_variables``."""
        return [np.array(value) for value in self._values(optimizer_variables(self.model))]

    def set_optimizer_state(self, arrays: list[Array]) -> None:
        """Set the values that ``optimizer_state`` returned."""
        self._assign(optimizer_variables(self.model), arrays)

    def take_settings(self, values: dict[str, Any]) -> None:
        """Set values that ``Settings.changed`` returned; see ``Replica``."""
        self.altered |= Settings(self.model).write(values)
        if self.shard is not None:
            self.shard.take_settings()

    @property
    def iterations(self) -> int:
        """The optimizer's step counter, which includes the steps of gradient accumulation."""
        return int(self._values([step_counter(self.model.optimizer)])[0])

    @iterations.setter
    def iterations(self, count: int) -> None:
        self._assign([step_counter(self.model.optimizer)], [np.asarray(count)])

    # Seeds, learning rate, the whole state.

    def seed_generators(self, rank: int, seed: int) -> None:
        """Seed the global random generators of the framework by rank and seed; layers without a seed may use them."""

    def generators(self) -> list[Array]:
        """Return the states of the framework's global random generators."""
        return []

    def set_generators(self, states: list[Array]) -> None:
        """Set the states that ``generators`` returned."""

    def fold_seeds(self, rank: int, seed: int | None) -> None:
        """Give the random layers of each rank a different seed state. Without a ``seed``, rank 0 keeps its state."""
        if rank == 0 and seed is None:
            return
        states = [seed_state.mix(state, i, rank, seed) for i, state in enumerate(self._values(self.seeds))]
        self._assign(self.seeds, states)

    @property
    def learning_rate(self) -> float:
        """The optimizer's current learning rate; with loss scaling, that of the inner optimizer."""
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            return float(self._values([rate])[0])
        counters = [v for v in self.model.optimizer.variables if not v.shape]
        for variable, value in zip(counters, self._values(counters), strict=True):
            variable.assign(value)
        return float(np.asarray(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            self._assign([rate], [np.asarray(value)])

    def snapshot(self) -> list[Array]:
        """Return copies of the variables of the model and its optimizers, in the order of ``model_variables``."""
        return [np.array(value) for value in self.view()]

    def view(self) -> list[Array]:
        """Return the values of ``snapshot`` without a copy if possible. They are valid until the next change."""
        trained = dict(zip(map(id, self.trainable), self._x_values(), strict=True))
        everything = model_variables(self.model)
        others = iter(self._values([variable for variable in everything if id(variable) not in trained]))
        return [trained[id(variable)] if id(variable) in trained else next(others) for variable in everything]

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned."""
        self._assign(model_variables(self.model), arrays)

    def ahead(self) -> list[Array]:
        """Return copies of the trainable variables as the next step reads them: with momentum, the look-ahead point."""
        return [np.array(value) for value in self._values(self.trainable)]

    def set_ahead(self, arrays: list[Array]) -> None:
        """Set the values that ``ahead`` returned, after ``restore``."""
        self._assign(self.trainable, arrays)

    def refresh(self) -> None:
        """Read values that were set in the Keras model after ``sync`` or ``finish``."""
        self._built()

    def sync(self) -> None:
        """Copy all state into the Keras model, with the weights at x."""
        self._settle()

    def finish(self) -> None:
        """Copy all state into the Keras model, with the weights at x, and finalize the weights as ``fit`` does."""
        self._refusing.close()
        if self.shard is not None:
            self.shard.detach()
        self._settle()
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        self._built()

    def close(self) -> None:
        """Allow the held optimizers to be built again."""
        self._refusing.close()
