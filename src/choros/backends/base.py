"""The parts that replicas of all three backends share: flat vectors, metrics, exact loss, seeds, learning rate.

A backend adds only how its variables are read and written, and how one batch is stepped, differentiated,
applied and evaluated: the abstract methods of ``BaseReplica``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from choros.backends import averages_of, seed_state, step_counter
from choros.backends.callback_settings import Settings
from choros.backends.gradient_capture import Capture
from choros.backends.gradient_presence import keep, leave_out, left_out
from choros.backends.loss_exactness import mixed_rows
from choros.backends.loss_weighting import LossWeightTracker
from choros.backends.metrics import LossSample, Metrics, gather, scatter, slices_of
from choros.backends.optimizers import build_held, held_variables, model_variables, optimizer_variables, unbuilt_refused
from choros.types import Array, Batch

_LARGE = 1 << 18  # values

Mark = tuple[list[Any], list[Array], tuple[Any, ...]]


class BaseReplica(Metrics):
    """One worker's compiled model; see ``choros.backends.replica.Replica`` for what each method means.

    Args:
        model: a compiled ``keras.Model``.
        workers: int. How many workers train together, needed to refuse what only one worker could do exactly.
    """

    _capture: Capture | None = None  # on PyTorch and TensorFlow

    def __init__(self, model: Any, workers: int = 1) -> None:
        self.model = model
        self.workers = workers
        self.blind = False  # it was built without y, and so can predict only
        self.revocable = self.repeats = self.watches = False
        self._total = 0
        self._held: tuple[Any, ...] | None = None  # the packed batch of the last gradients, where the step ``repeats``
        self._refusing = ExitStack()
        self._lay_out()

    # What a backend adds, besides _values and _assign.

    @abstractmethod
    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        """``train_step`` on the packed batch, optimizer and all; returns ``self._custom(logs)``."""

    @abstractmethod
    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], LossSample, float]:
        """``train_step`` with the optimizer left out.

        Returns the gradients in the order of ``trainable`` (None is zero), what the loss metric was told, and what the
        loss divided by. Leaves the loss metric's variables as they were, and sets ``self._logs`` to
        ``self._custom(logs)``, as does ``_evaluate``.
        """

    def attempt(self, data: tuple[Any, ...], rows: int, afresh: bool) -> tuple[list[Array | None], float]:
        """``train_step`` with the optimizer left out, not compiled: its gradients, and what the loss divided by.

        Variables that the step changes are changed, but on JAX. ``afresh``: trace again, as the step means another one.
        """
        arrays, _, n = self._gradients(data, rows)
        return arrays, n

    def left(self, data: tuple[Any, ...], rows: int, shifts: list[float]) -> tuple[list[Array], dict[str, Any]]:
        """Return what ``train_step`` leaves in ``left_in``, and its logs; all that it changes is put back.

        Args:
            data: a packed batch.
            rows: int. Its rows.
            shifts: what a stand-in for the optimizer adds to each trainable variable. If not 0, it counts a step too.
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
        """Return a name of what depends on the update in a step, as far as its program tells; "" where nothing does.

        None where that cannot be told. Conditions count as met: what a step does now and then is found too.

        Args:
            data: a packed batch.
            rows: int. Its rows.
        """
        return None

    def left_in(self) -> list[Any]:
        """Return the trainable, the other and the metrics' variables, which a step may set."""
        return [*self.trainable, *self.model.non_trainable_variables, *self.metric_variables]

    @abstractmethod
    def _apply(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """Run the compiled optimizer on ``gradient / divisor``; on return ``gradient`` is no longer needed.

        ``absent`` are the places of the variables without a gradient on any rank. They get what plain Keras gives them
        on this backend: None, or zeros on JAX.
        """

    @abstractmethod
    def _repeat(self, data: tuple[Any, ...], gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """``train_step``, in which the optimizer gets ``gradient / divisor``; else as ``_gradients`` and ``_apply``."""

    @abstractmethod
    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[LossSample, float]:
        """``test_step``; returns what the loss metric was told, which is left as it was, and the loss's divisor."""

    @abstractmethod
    def _predict(self, data: tuple[Any, ...]) -> Any:
        """``predict_step``: the model's outputs."""

    @abstractmethod
    def look_ahead(self, momentum: float) -> None:
        """Nesterov momentum around the step; the first call, before any step, arms it."""

    @abstractmethod
    def _settle(self) -> None:
        """Leave the look-ahead point for x, and bring all state into the Keras model."""

    def _built(self) -> None:
        """After ``build`` and ``finish``: take up the model's state."""

    # The layout of the flat vectors.

    def _lay_out(self) -> None:
        self.trainable: list[Any] = list(self.model.trainable_variables)
        self.moving: list[Any] = moving_statistics(self.model)
        self.seeds: list[Any] = seed_state.find(self.model)
        self.slices = slices_of(self.trainable)
        self.moving_slices = slices_of(self.moving)
        self.size = self.slices[-1].stop if self.slices else 0
        self.others = self.moving_slices[-1].stop if self.moving_slices else 0
        self.dtype = vector_dtype(self.trainable)

    def build(self, batch: Batch) -> None:
        """Create what the first ``fit`` would create, from one batch that has rows."""
        data = self.pack(batch)
        with blind(self.model, batch) as self.blind:
            self.model._symbolic_build(data_batch=data)
            build_held(self.model, data)
            self._lay_out()
            self._refusing.enter_context(unbuilt_refused(self.model))
            self.weigher = LossWeightTracker(self.model, self.workers)
            if self.workers > 1:
                self.weigher.refuse(mixed_rows(self.model, data))
            self._take_metrics()
            self._built()
            self.reset_metrics()

    def take_up(self) -> None:
        """Instead of ``build``, for a built model that Keras' own loop trains with ``half_step`` and ``update``."""
        self.within_fit = True
        self._lay_out()
        self.weigher = LossWeightTracker(self.model)
        self._take_metrics()
        self._built()

    def half_step(self, data: tuple[Any, ...]) -> tuple[list[Array | None], float, dict[str, Any]]:
        """``train_step`` on a batch as Keras' loop has it, up to the optimizer.

        Returns:
            The gradients in the order of ``trainable`` (None is zero), what the loss divided by, and the step's logs.
        """
        rows = int(keras.tree.flatten(data)[0].shape[0])
        with self._put_back(data):
            arrays, _, n = self._gradients(data, rows)
        return arrays, n, self._logs or {}

    def update(self, gradient: Array, divisor: float) -> dict[str, Any] | None:
        """The optimizer's half: run it on ``gradient / divisor``; returns the step's logs if it ``repeats``."""
        self._make_update(gradient, divisor, left_out(gradient, self.slices))
        return (self._logs or {}) if self.repeats else None

    @property
    def lead(self) -> BaseReplica:
        """The replica itself: it is one model."""
        return self

    def on_lead(self, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Call the function with the batch."""
        return function(batch)

    def skip(self) -> None:
        """Instead of ``update``: count the step only."""
        self.iterations += 1

    def pack(self, batch: Batch) -> tuple[Any, ...]:
        """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` as ``fit`` passes them, floats cast to Keras' floatx."""
        if batch.packed is not None:
            packed: tuple[Any, ...] = batch.packed
            return packed
        floatx = keras.config.floatx()

        def leaf(array: Any) -> Any:
            if array is not None and array.dtype.kind == "f" and array.dtype != floatx and array.dtype.itemsize > 2:
                array = array.astype(floatx)
            return self._leaf(array)

        data = parts(batch)
        if all(isinstance(part, np.ndarray) for part in data):  # no tree to walk at every batch
            return tuple(leaf(part) for part in data)
        return tuple(keras.tree.map_structure(leaf, part) for part in data)

    def _leaf(self, array: Any) -> Any:
        """One array of a batch as the backend's step takes it."""
        return array

    def ready(self, batch: Batch) -> Batch:
        """The same batch, packed and on the device."""
        return replace(batch, packed=self._placed(self.pack(batch))) if batch.rows else batch

    def _placed(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """A packed batch on the device, where packing has not put it there."""
        return data

    # Training.

    def step(self, batch: Batch) -> None:
        """One plain local training step; nothing for a batch of no rows."""
        if batch.rows:
            self._logs = self._step(self.pack(batch))
            self._rows += batch.rows

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out``; zeros for a batch of no rows."""
        self._total, self._held = batch.total, None
        if not batch.rows:
            out[:] = 0
            for where in self.slices:
                leave_out(out, where)
            return
        data = self.pack(batch)
        with self._scaled(batch) as share, self._put_back(data):
            arrays, told, n = self._gradients(data, batch.rows)
        self._rows += batch.rows
        loss = self._known(told, batch.rows)
        for where, array in zip(self.slices, arrays, strict=True):
            if array is None:
                leave_out(out, where)
            else:
                np.multiply(array.reshape(-1), n / share, out=out[where], dtype=self.dtype, casting="same_kind")
                keep(out, where)
        out[-2] = n * loss
        out[-1] = n

    @contextmanager
    def _scaled(self, batch: Batch) -> Iterator[float]:
        """For a while, scale a float16 loss by this rank's share of the rows; the gradients are to be divided by it.

        A loss that is a mean has gradients of each row that are inverse to its rows. So they overflow at the scale at
        which they do in one process, whose batch is the global one.
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
        """Divide the gradient by the last element and run the real optimizer. ``summed`` is not kept."""
        divisor = 1.0 if self.weigher.sums else float(summed[-1])
        if divisor == 0:
            return
        self._count(float(summed[-2]) / divisor, self._total)
        if self.trainable:
            self._make_update(summed[:-2], divisor, left_out(summed, self.slices))

    @contextmanager
    def _put_back(self, data: tuple[Any, ...]) -> Iterator[None]:
        """Keep the batch of a step that ``repeats``, and restore the variables that its gradients have changed."""
        if not self.repeats:
            yield
            return
        held, generators = self._marked(), self.generators()
        yield
        self._go_to(held)
        self.set_generators(generators)
        self._held = data

    def _make_update(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        """Run the optimizer after the step, or in the step made again; a rank without rows has only the former."""
        held, self._held = self._held, None
        if held is None:
            self._apply(gradient, divisor, absent)
        else:
            self._repeat(held, gradient, divisor, absent)

    def outcome(self) -> list[Array]:
        """Return copies of what a step that ``repeats`` leaves alike on all ranks: all but seeds and frozen weights."""
        return [np.array(value) for value in self._values(self._alike())]

    def set_outcome(self, arrays: list[Array]) -> None:
        """Set what ``outcome`` of another rank gave."""
        self._assign(self._alike(), arrays)

    def _alike(self) -> list[Any]:
        kept = {id(v) for v in (*self.seeds, *large_frozen(self.model))}
        return [*self.trainable, *(v for v in self.model.non_trainable_variables if id(v) not in kept)]

    def evaluate(self, batch: Batch) -> None:
        """One test step: metrics and one line of the tally."""
        entry = (0.0, 0.0, 0.0)
        if batch.rows:
            told, n = self._evaluate(self.pack(batch), batch.rows)
            self._rows += batch.rows
            loss = self._known(told, batch.rows)
            entry = (n * loss, n, float(batch.rows))
        self._tally.append(np.array(entry))

    def predict(self, batch: Batch) -> list[Any]:
        """Return the model's predictions for the batch's ``x``, as nested arrays; nothing for a batch of no rows."""
        if not batch.rows:
            return []
        outputs = self._predict(self.pack(Batch(batch.x, None, None, batch.rows, batch.total)))
        return [keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)]

    # A step that may be taken back.

    def mark(self) -> Mark:
        """Return what ``gradients`` changes, as it is now."""
        return self._marked(), self.generators(), self._facts()

    def _facts(self) -> tuple[Any, ...]:
        return self._rows, self._logs, dict(self._said), self._untold, self._by_batch, self._total

    def swap(self, mark: Mark) -> Mark:
        """Go back, or forward again, to a mark; returns a mark of what was left."""
        left = self._copied(), self.generators(), self._facts()
        held, generators, facts = mark
        self._go_to(held)
        self.set_generators(generators)
        self._rows, self._logs, self._said, self._untold, self._by_batch, self._total = facts
        return left

    def _marked(self) -> list[Any]:
        """Return the values of the variables that ``gradients`` changes; some are filled by the next call."""
        return self._copied()

    def _copied(self) -> list[Any]:
        """Copies of these variables."""
        return [np.array(value) for value in self._values(self._changing())]

    def _go_to(self, held: list[Any]) -> None:
        """Set these variables from ``_marked`` or ``_copied``."""
        self._assign(self._changing(), held)

    def _changing(self) -> list[Any]:
        weights = self.trainable if self.repeats else []  # such a step may set them, and does so again
        return [*weights, *self.model.non_trainable_variables, *self.metric_variables]

    # Vectors.

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out``: x, where momentum looks ahead."""
        gather(self._x_values(), self.slices, out)

    def _x_values(self) -> list[Array]:
        """Return the trainable variables' values, without a copy where that can be: x, where momentum looks ahead."""
        return self._values(self.trainable)

    def set(self, vector: Array) -> None:
        """Set the trainable variables; always copies."""
        self._assign(self.trainable, scatter(vector, self.slices, self.trainable))

    def get_others(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""
        gather(self._values(self.moving), self.moving_slices, out)

    def set_others(self, vector: Array) -> None:
        """Set the moving statistics; always copies."""
        self._assign(self.moving, scatter(vector, self.moving_slices, self.moving))

    # The optimizer's state.

    @property
    def averages(self) -> bool:
        """True where the optimizer keeps moving averages of the weights (``use_ema``)."""
        return bool(averages_of(self.model.optimizer))

    def get_average(self, out: Array) -> None:
        """Copy the optimizer's moving averages of the trainable variables into ``out``."""
        gather(self._values(self._averages()), self.slices, out)

    def set_average(self, vector: Array) -> None:
        """Set the moving averages; always copies. The variables stay as they are."""
        values = scatter(vector, self.slices, self.trainable)
        pairs = zip(self._averages(), self.trainable, values, strict=True)
        kept = [(average, value) for average, variable, value in pairs if average is not variable]
        self._assign([average for average, _ in kept], [value for _, value in kept])

    def _averages(self) -> list[Any]:
        """Return each trainable variable's average; the variable itself where none is kept."""
        averages = averages_of(self.model.optimizer)
        return [averages.get(id(variable), variable) for variable in self.trainable]

    def optimizer_state(self) -> list[Array]:
        """Return copies of the variables of all optimizers, in the order of ``optimizer_variables``."""
        return [np.array(value) for value in self._values(optimizer_variables(self.model))]

    def set_optimizer_state(self, arrays: list[Array]) -> None:
        """Set what ``optimizer_state`` gave."""
        self._assign(optimizer_variables(self.model), arrays)

    def take_settings(self, values: dict[str, Any]) -> None:
        """See ``Replica``."""
        Settings(self.model).write(values)

    @property
    def iterations(self) -> int:
        """The optimizer's count of steps, those of gradient accumulation included."""
        return int(self._values([step_counter(self.model.optimizer)])[0])

    @iterations.setter
    def iterations(self, count: int) -> None:
        self._assign([step_counter(self.model.optimizer)], [np.asarray(count)])

    # Seeds, learning rate, the whole state.

    def seed_generators(self, rank: int, seed: int) -> None:
        """Set the library's own random generators, which layers without a seed may use, by rank and seed."""

    def generators(self) -> list[Array]:
        """Return the state of these generators."""
        return []

    def set_generators(self, states: list[Array]) -> None:
        """Set what ``generators`` gave."""

    def fold_seeds(self, rank: int, seed: int | None) -> None:
        """Make random layers differ by rank; rank 0 keeps the model's seed state unless a ``seed`` is given."""
        if rank == 0 and seed is None:
            return
        states = [seed_state.mix(state, i, rank, seed) for i, state in enumerate(self._values(self.seeds))]
        self._assign(self.seeds, states)

    @property
    def learning_rate(self) -> float:
        """The optimizer's present learning rate (the inner one's under loss scaling)."""
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            return float(self._values([rate])[0])
        counters = [v for v in self.model.optimizer.variables if not v.shape]
        for variable, value in zip(counters, self._values(counters), strict=True):
            variable.assign(value)
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            self._assign([rate], [np.asarray(value)])

    def snapshot(self) -> list[Array]:
        """Copies of the variables of the model and of its optimizers, in the order of ``model_variables``."""
        return [np.array(value) for value in self.view()]

    def view(self) -> list[Array]:
        """Return what ``snapshot`` does, without a copy where that can be: valid until the next change."""
        trained = dict(zip(map(id, self.trainable), self._x_values(), strict=True))
        everything = model_variables(self.model)
        others = iter(self._values([variable for variable in everything if id(variable) not in trained]))
        return [trained[id(variable)] if id(variable) in trained else next(others) for variable in everything]

    def restore(self, arrays: list[Array]) -> None:
        """Set what ``snapshot`` gave."""
        self._assign(model_variables(self.model), arrays)

    def ahead(self) -> list[Array]:
        """Copies of the trainable variables where the next step is taken: with momentum the look-ahead point."""
        return [np.array(value) for value in self._values(self.trainable)]

    def set_ahead(self, arrays: list[Array]) -> None:
        """Set what ``ahead`` gave, after ``restore``."""
        self._assign(self.trainable, arrays)

    def refresh(self) -> None:
        """Take up what was set in the model itself since ``sync`` or ``finish``."""
        self._built()

    def sync(self) -> None:
        """Bring all state into the model, at x."""
        self._settle()

    def finish(self) -> None:
        """Bring all state into the model, at x, and do what Keras does at the end of ``fit``."""
        self._refusing.close()
        self._settle()
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        self._built()

    def close(self) -> None:
        """Nothing runs."""
        self._refusing.close()


def parts(batch: Batch) -> tuple[Any, ...]:
    """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``: what Keras takes for a batch."""
    used = 3 if batch.sample_weight is not None else 2 if batch.y is not None else 1
    return (batch.x, batch.y, batch.sample_weight)[:used]


@contextmanager
def blind(model: Any, batch: Batch) -> Iterator[bool]:
    """For a while, leave out the losses and metrics that cannot be built, as the batch has no y; gives whether."""
    own = vars(model)
    names = ("_compile_loss", "_compile_metrics")
    kept = {name: own[name] for name in names}
    missing = batch.y is None and any(part is not None and not part.built for part in kept.values())
    if missing:
        own.update(dict.fromkeys(names))
    try:
        yield missing
    finally:
        own.update(kept)


def vector_dtype(trainable: list[Any]) -> np.dtype[Any]:
    """The type of flat vectors: float32, or float64 where a trainable variable is."""
    wide = any(keras.backend.standardize_dtype(v.dtype) == "float64" for v in trainable)
    return np.dtype(np.float64 if wide else np.float32)


def large_frozen(model: Any) -> list[Any]:
    """Return the large variables that training is not expected to change: frozen layers', and quantized weights."""
    held = {id(v) for v in held_variables(model)}
    return [v for v in model.non_trainable_variables if id(v) not in held and math.prod(v.shape) >= _LARGE]


def moving_statistics(model: Any) -> list[Any]:
    """The float variables that are no weights: what layers made non-trainable, not what a user froze.

    A second optimizer's variables are none, where the model lists them as its own: each worker keeps its slots.
    """
    frozen = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    frozen |= {id(v) for v in held_variables(model)}
    return [
        v
        for v in model.non_trainable_weights
        if id(v) not in frozen and keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))
    ]
