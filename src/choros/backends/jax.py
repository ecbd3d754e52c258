"""The replica on JAX. Between compiled steps the state is held in lists of device arrays, as in Keras' trainer.

A reduced step consists of two compiled programs; the all-reduce runs between them. The first program is the model's
``train_step``. It is traced while a stand-in for ``optimizer.stateless_apply`` stores the gradients, so a user-defined
``train_step`` works unchanged. The program returns the gradients as a list: to flatten them in the compiled program
took twenty times as long as the step in a measurement.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from choros.backends.base import BaseReplica
from choros.backends.devices.jax import MeshSharding, devices_of, row_shards
from choros.backends.devices.placement import Placement, VariablePlacement
from choros.backends.gradient_capture import refuse_other_optimizers
from choros.backends.gradient_capture.jax import kept_gradients
from choros.backends.metrics import UNUSED, LossSample, flattened
from choros.backends.optimizers import model_variables
from choros.backends.step_windows import alike, window_length
from choros.backends.variable_groups import large_frozen
from choros.errors import InexactLossError
from choros.types import Array, Batch

_SMALL, _MANY = 1 << 14, 64  # most values of a small variable; least number of small variables that become views

Arrays = list[jax.Array]
_Parts = tuple[jax.Array, list[jax.Array]]


class JaxReplica(BaseReplica):
    """A replica on JAX; see ``choros.backends.replica.Replica``.

    The variables of the Keras model are stale until ``sync`` or ``finish``.

    Args:
        model: a compiled ``keras.Model``.
        workers: number of workers that train.
        spread: the devices of the replica, if there are several. Defaults to Keras' default device.
    """

    _windows_log = False  # whether a window was traced whose steps have logs besides the metrics
    _x: list[Any] | None = None  # the weights x with momentum; ``_state`` then holds the look-ahead point

    def __init__(self, model: keras.Model, workers: int = 1, spread: MeshSharding | None = None) -> None:
        super().__init__(model, workers)
        self.spread = spread
        self._train: Any = None
        self._tried: Any = None
        self._leaves: Any = None
        self._windows: dict[Any, int] = {}  # by length and form of the batches: what ``window`` returns
        self._left: list[Any] = []  # the model's values after ``sync``

    def refresh(self) -> None:
        """Read the Keras model's variables again, if any was set since ``sync`` or ``finish``."""
        now = [v.value for part in self._variables for v in part]
        if len(now) != len(self._left) or any(
            value is not previous for value, previous in zip(now, self._left, strict=True)
        ):
            self._built()

    def _load(self, arrays: list[Array]) -> None:
        # The Keras model's variables are set, not only the state: their old values would stay in memory beside it.
        for variable, array in zip(model_variables(self.model), arrays, strict=True):
            variable.assign(copied(np.asarray(array, keras.backend.standardize_dtype(variable.dtype))))
        self._built()

    @property
    def reusable(self) -> bool:
        """True if the steps are compiled, for one device; see ``BaseReplica``."""
        return self._compiles and self.spread is None and not self.altered

    def sync(self) -> None:
        """Copy all state into the Keras model, with the weights at x. The replica keeps its state."""
        super().sync()
        self._left = [v.value for part in self._variables for v in part]

    def _built(self) -> None:
        model = self.model
        variables = [
            self.trainable,
            list(model.non_trainable_variables),
            list(model.optimizer.variables),
            self.metric_variables,
        ]
        self._variables = variables
        self._state: list[list[Any]] = [self._taken(part) for part in variables]
        self._shared = True  # the Keras model's variables use the same weight arrays; ``set`` copies them first
        self._where = {id(v): (p, i) for p, part in enumerate(variables) for i, v in enumerate(part)}
        tracker = [] if self.loss_metric is None else [self.loss_metric.total, self.loss_metric.count]
        fixed = {id(v) for v in large_frozen(model)}
        self._frozen = [i for i, v in enumerate(variables[1]) if id(v) in fixed]  # indices in the second list
        self._loss_at = [self._where[id(v)][1] for v in tracker]
        self._floats = all(value.dtype == np.float32 for value in self._state[3])  # all metric variables are float32
        self._after = None
        self._small: list[int] | None = None  # indices of variables that ``_vector_parts`` passes as views
        if self._train is None:
            self._compile()

    def _taken(self, variables: list[Any]) -> list[Any]:
        """Return the variables' values. With several devices, place them there and set the variables to the result."""
        values = [v.value for v in variables]
        if self.spread is not None:
            values = self.spread.place(values)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        return values

    def _compile(self) -> None:
        """Compile the steps. On several devices, the state keeps its sharding."""
        state = tuple([v.sharding for v in part] for part in self._state)
        trained, others, slots, metrics = state
        step = lambda *arguments: self.model.train_step(arguments[:4], arguments[4])  # noqa: E731 - jit caches by function object
        self._train = self._on_batches(step, (0, 1, 2, 3), (None, state))
        lie = (None, None, others, metrics, None)
        self._window: Any = self._jit(self._trace_window, (0, 1, 2, 3, 4), None)
        self._differentiate = self._on_batches(self._trace_gradients, (1, 3), lie)
        self._differentiate_kept = self._on_batches(self._trace_kept, (), lie)
        self._test = self._on_batches(self._trace_test, (1, 2), (None, others, metrics, None))
        foretell = lambda trained, others, data: self.model.predict_step((trained, others), data)  # noqa: E731 - same
        self._foretell = self._on_batches(foretell, (), None)
        self._update = self._jit(self._trace_update, (0, 1), (slots, trained))
        self._repeat_step = self._on_batches(self._trace_repeat, (0, 1, 2, 3), (state, None))
        self._leap = self._jit(_leap, (0, 1), (trained, trained))
        self._put = self._jit(self._trace_put, (0,), trained, keep_unused=True)
        self._shift = self._jit(self._trace_shift, (0, 1), (trained, trained))

    @property
    def _compiles(self) -> bool:
        return bool(self.model.jit_compile and not self.model.run_eagerly)

    def _on_batches(self, step: Callable[..., Any], donate: Sequence[int], out: Any) -> Callable[..., Any]:
        if self.spread is None or not self._compiles:
            return self._keeping_frozen(step, donate)
        return self.spread.step(step, donate, out)

    def _keeping_frozen(self, step: Callable[..., Any], donate: Sequence[int]) -> Callable[..., Any]:
        """Compile a step whose second argument holds the non-trainable variables.

        Frozen variables are neither donated nor returned. They may be in memory that processes share. XLA would copy
        such memory if it were donated or an output.
        """
        frozen = self._frozen
        if not frozen or not self._compiles:
            return self._jit(step, donate, None)

        def call_with_frozen(fixed: list[Any], trained: Arrays, others: list[Any], *more: Any) -> Any:
            rest, fixed_by_index = iter(others), dict(zip(frozen, fixed, strict=True))
            values = [fixed_by_index[i] if i in fixed_by_index else next(rest) for i in range(len(others) + len(fixed))]
            return _unchanged(fixed, step(trained, values, *more))

        compiled = jax.jit(call_with_frozen, donate_argnums=[index + 1 for index in donate])

        def call(trained: Arrays, others: list[Any], *more: Any) -> Any:
            fixed = [others[i] for i in frozen]
            rest = [value for i, value in enumerate(others) if i not in frozen]
            result = compiled(fixed, trained, rest, *more)
            put = lambda leaf: fixed[leaf.index] if isinstance(leaf, _Unchanged) else leaf  # noqa: E731
            return jax.tree_util.tree_map(put, result, is_leaf=lambda leaf: isinstance(leaf, _Unchanged))

        return call

    def _jit(self, function: Callable[..., Any], donate: Sequence[int], out: Any, **more: Any) -> Callable[..., Any]:
        if not self._compiles:
            return function
        if self.spread is not None and out is not None:
            more["out_shardings"] = out
        compiled: Callable[..., Any] = jax.jit(function, donate_argnums=donate, **more)
        return compiled

    # One batch.

    def _placed(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.spread is None or not self._compiles:
            placed: tuple[Any, ...] = jax.device_put(data)
            return placed
        return self.spread.lay(data)

    def placement(self, batch: Batch) -> Placement:
        """Return the devices of the variables and of a batch's rows. The batch is placed for it."""
        variables = []
        for variable in model_variables(self.model):
            where = self._where.get(id(variable))
            value = variable.value if where is None else self._state[where[0]][where[1]]
            variables.append(VariablePlacement(variable.path, tuple(variable.shape), devices_of(value)))
        leaf = jax.tree_util.tree_leaves(tuple(self.ready(batch).packed))[0]
        return Placement(tuple(variables), row_shards(leaf, batch.rows))

    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        logs, state = self._train(*self._state, data)
        self._state = list(state)
        return self._custom(logs)

    def window(self, batch: Batch, most: int) -> int:
        """Return how many steps one program makes; see ``Replica``. Steps with a convolution are programs of their own.

        XLA for the CPU takes eight times as long for a convolution within a loop.
        """
        alone = not self._compiles or self.spread is not None or bool(self._frozen) or jax.default_backend() != "cpu"
        length = 1 if alone else window_length(self.model, self.size, batch, most)
        if length == 1:
            return 1
        key = length, alike(batch), self._x is None
        if key not in self._windows:
            self._windows_log = False
            batches = [self.pack(batch)] * length
            program = self._window.trace(*self._state, self._x or [], 0.0, np.int32(1), batches).jaxpr
            slow = program.effects or self._windows_log or "conv_general_dilated" in _operations(program.jaxpr)
            self._windows[key] = 1 if slow else length
        return self._windows[key]

    def steps(self, batches: Sequence[Batch], window: int, momentum: float = 0.0) -> None:
        """Run one step for each batch, up to ``window``, as one program; see ``Replica``."""
        if window == 1:
            super().steps(batches, window, momentum)
            return
        data = [self._packed(batch) for batch in batches]
        data += data[-1:] * (window - len(data))
        count, x = np.int32(len(batches)), self._x or []
        state, x = self._window(*self._state, x, momentum, count, data)
        self._state, self._x = list(state), self._x and x
        self._logs = None
        self._rows += sum(batch.rows for batch in batches)

    def _trace_window(self, *arguments: Any) -> Any:
        """Trace ``count`` steps. More batches are not used: they let one program make any number of steps."""
        *state, x, momentum, count, batches = arguments
        stacked = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *batches)

        def step(number: Any, carried: Any) -> Any:
            state, x = carried
            data = jax.tree_util.tree_map(lambda leaves: leaves[number], stacked)
            logs, after = self.model.train_step(state, data)
            self._windows_log |= self._custom(logs) is not None
            state = tuple(
                [new.astype(old.dtype) for new, old in zip(part, before, strict=True)]
                for part, before in zip(after, state, strict=True)
            )
            if x:
                x, ahead = _leap(state[0], x, momentum)
                state = (ahead, *state[1:])
            return state, x

        return jax.lax.fori_loop(0, count, step, (tuple(map(list, state)), list(x)))

    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], LossSample, float]:
        keep_arrays = self.revocable or self.repeats  # a mark holds the arrays, so they must not be donated
        differentiate = self._differentiate_kept if keep_arrays else self._differentiate
        gradients, figures, others, metrics, logs = differentiate(*self._state, data)
        self._state[1], self._state[3] = others, metrics
        self._logs = logs
        read = np.asarray(figures)
        self._after = read[3:].astype(np.float64) if keep_arrays and self._floats else None
        loss, weight, n = read[:3].tolist()
        return [np.asarray(g) for g in gradients], LossSample(loss, weight), n

    def _copied(self) -> list[Any]:
        # Copies of the lists suffice, because JAX arrays do not change and ``_gradients`` does not donate them then.
        return [list(self._state[1]), list(self._state[3])]

    def _go_to(self, values: list[Any]) -> None:
        self._state[1], self._state[3] = list(values[0]), list(values[1])

    def attempt(self, data: tuple[Any, ...], rows: int, afresh: bool) -> tuple[list[Array | None], float]:
        """Run a trial step; see ``BaseReplica``. It is compiled at optimization level 0, as it runs few times."""
        if self._tried is None or afresh:
            step = lambda *arguments: self._trace_gradients(*arguments)[:2]  # noqa: E731 - jit caches by function object
            quick = {"xla_backend_optimization_level": 0}
            self._tried = jax.jit(step, compiler_options=quick) if self._compiles else step
        gradients, figures = self._tried(*self._state, data)
        return [np.asarray(g) for g in gradients], float(figures[2])

    def left(self, data: tuple[Any, ...], rows: int, shifts: list[float]) -> tuple[list[Array], dict[str, Any]]:
        """Return the values that a step sets; see ``BaseReplica``. One compiled program takes all shifts."""
        if self._leaves is None:

            def step(shifts: Any, state: tuple[Any, ...], data: tuple[Any, ...]) -> Any:
                refuse_other_optimizers(self.model)
                with kept_gradients(self.model.optimizer, shifts):
                    logs, (trained, others, _, metrics) = self.model.train_step(state, data)
                return [*trained, *others, *metrics], self._custom(logs) or {}

            quick = {"xla_backend_optimization_level": 0}
            self._leaves = jax.jit(step, compiler_options=quick) if self._compiles else step
        values, logs = self._leaves(np.array(shifts), tuple(self._state), data)
        return [np.asarray(value) for value in values], logs

    def structure(self, data: tuple[Any, ...], rows: int) -> str | None:
        """Find values that depend on the update; see ``BaseReplica``.

        The step is traced with the updated values as extra inputs. Their uses are then followed through the jaxpr.
        """
        calls: list[int] = []

        def step(state: tuple[Any, ...], data: tuple[Any, ...], trained: Arrays, slots: Arrays) -> Any:
            with kept_gradients(self.model.optimizer, becomes=(trained, slots)) as captured:
                logs, (trained, others, slots, metrics) = self.model.train_step(state, data)
            calls.append(len(captured))
            return list(trained), list(slots), list(others), list(metrics), self._custom(logs) or {}

        updated = self._state[0], self._state[2]
        program, shapes = jax.make_jaxpr(step, return_shape=True)(tuple(self._state), data, *updated)
        if calls != [1]:
            return None
        inputs, count = program.jaxpr.invars, len(updated[0]) + len(updated[1])
        fresh = inputs[len(inputs) - count :]
        dependent = set(fresh)
        for equation in program.jaxpr.eqns:
            variables = [variable for variable in equation.invars if not hasattr(variable, "val")]  # literals have one
            if any(variable in dependent for variable in variables):
                dependent.update(equation.outvars)
        parts = (self._variables[0], self._variables[2], self._variables[1], self._variables[3])
        names = [variable.path for part in parts for variable in part]
        names += [f"the log {name}" for name in sorted(shapes[4])]
        for index, (output, name) in enumerate(zip(program.jaxpr.outvars, names, strict=False)):
            literal = hasattr(output, "val")
            if (index < count and output is not fresh[index]) or (
                index >= count and not literal and output in dependent
            ):
                return str(name)
        return ""

    def _trace_gradients(
        self, trained: Arrays, others: Arrays, slots: Arrays, metrics: Arrays, data: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        refuse_other_optimizers(self.model)
        optimizer = self.model.optimizer
        with self.weigher as weigher, kept_gradients(optimizer) as captured:
            state = (trained, others, slots, self._without_loss(metrics))
            logs, (_, others, _, seen) = self.model.train_step(state, data)
            n = weigher.divisor(_rows(data), data)
        if len(captured) != 1:
            raise InexactLossError(
                f"train_step of {type(self.model).__name__} used model.optimizer {len(captured)} times: AllReduce "
                "needs exactly one update a step, through model.optimizer. Use another algorithm, or one optimizer."
            )
        figures = jnp.stack([*self._loss(seen), jnp.asarray(n, jnp.float32)])
        return captured[0], figures, others, self._keep_loss(seen, metrics), self._custom(logs)

    def _trace_kept(self, *arguments: Any) -> tuple[Any, ...]:
        """Trace the gradients, and append the metric variables to the figures, so that the host reads one array."""
        gradients, figures, others, metrics, logs = self._trace_gradients(*arguments)
        if self._floats:
            figures = jnp.concatenate([figures, *(jnp.ravel(metric) for metric in metrics)])
        return gradients, figures, others, metrics, logs

    def _apply(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        # XLA reads host memory in place if it is aligned to 64 bytes, and copies it otherwise.
        parts = self._vector_parts(gradient)
        slots, trained = self._update(self._state[2], self._state[0], parts, np.asarray(divisor, self.dtype))
        self._state[2], self._state[0] = slots, trained
        jax.block_until_ready(trained)  # XLA may read the caller's memory until the update is complete

    def _trace_update(self, slots: Arrays, trained: Arrays, parts: _Parts, divisor: jax.Array) -> tuple[Any, ...]:
        trained, slots = self.model.optimizer.stateless_apply(slots, self._divided(parts, divisor), trained)
        return slots, trained  # the order of the donated arguments, so that XLA updates each buffer in place

    def _repeat(self, data: tuple[Any, ...], gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        parts = self._vector_parts(gradient)
        state, self._logs = self._repeat_step(*self._state, parts, np.asarray(divisor, self.dtype), data)
        self._state = list(state)
        jax.block_until_ready(self._state[0])  # XLA may read the caller's memory until the update is complete

    def _trace_repeat(
        self,
        trained: Arrays,
        others: Arrays,
        slots: Arrays,
        metrics: Arrays,
        parts: _Parts,
        divisor: jax.Array,
        data: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        with kept_gradients(self.model.optimizer, gives=self._divided(parts, divisor)):
            state = (trained, others, slots, self._without_loss(metrics))
            logs, (trained, others, slots, seen) = self.model.train_step(state, data)
        return (trained, others, slots, self._keep_loss(seen, metrics)), self._custom(logs)

    def _vector_parts(self, vector: Array) -> tuple[Array, list[Array]]:
        """Return a flat vector as an argument of a compiled program: all of it, and views of small variables.

        XLA compiles a kernel for each offset at which it reads a vector: 4 ms for each variable, and 12 s for 500
        scalars with Adam on two cores. Views of the same shape share a kernel. XLA copies a view, as it is not aligned
        to 64 bytes; for small ones this takes 1.5 us. On a GPU each view would be a transfer.
        """
        if self._small is None:
            small = [index for index, s in enumerate(self.slices) if s.stop - s.start <= _SMALL]
            on_cpu = jax.default_backend() == "cpu" and self.spread is None
            self._small = small if on_cpu and len(small) >= _MANY else []
        return vector, [vector[self.slices[index]] for index in self._small]

    def _divided(self, parts: _Parts, divisor: jax.Array) -> list[Any]:
        """Divide a gradient, and split it into arrays of the variables' shapes."""
        return [(value / divisor).reshape(v.shape) for value, v in zip(self._split(parts), self.trainable, strict=True)]

    def _split(self, parts: _Parts) -> list[Any]:
        """Return the values of each variable from ``_vector_parts``, flat."""
        flat, views = parts
        by_index = dict(zip(self._small or [], views, strict=True))
        return [by_index[index] if index in by_index else flat[s] for index, s in enumerate(self.slices)]

    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[LossSample, float]:
        trained = self._state[0] if self._x is None else self._x
        figures, others, metrics, self._logs = self._test(trained, self._state[1], self._state[3], data)
        self._state[1], self._state[3] = others, metrics
        loss, weight, n = np.asarray(figures).tolist()
        return LossSample(loss, weight), n

    def _trace_test(self, trained: Arrays, others: Arrays, metrics: Arrays, data: tuple[Any, ...]) -> tuple[Any, ...]:
        with self.weigher as weigher:
            logs, (_, others, seen) = self.model.test_step((trained, others, self._without_loss(metrics)), data)
            n = weigher.divisor(_rows(data), data, strict=False)
        figures = jnp.stack([*self._loss(seen), jnp.asarray(n, jnp.float32)])
        return figures, others, self._keep_loss(seen, metrics), self._custom(logs)

    def _predict(self, data: tuple[Any, ...]) -> Any:
        outputs, _ = self._foretell(self._state[0] if self._x is None else self._x, self._state[1], data)
        return outputs

    def in_state(self, state: tuple[Any, ...]) -> None:
        """Continue with the state of Keras' training loop."""
        self._state = [list(part) for part in state]

    def out_state(self) -> tuple[Any, ...]:
        """Return the state for Keras' training loop."""
        return tuple(self._state)

    # The loss metric starts each reduced batch from zero, so that it yields the loss of this batch only.

    def _without_loss(self, metrics: list[Any]) -> list[Any]:
        return [jnp.zeros_like(m) if i in self._loss_at else m for i, m in enumerate(metrics)]

    def _loss(self, metrics: list[Any]) -> tuple[Any, Any]:
        if not self._loss_at:
            return jnp.asarray(UNUSED, jnp.float32), jnp.zeros((), jnp.float32)
        total, count = (metrics[i] for i in self._loss_at)
        return jnp.asarray(jnp.where(count == 0, UNUSED, total / count), jnp.float32), jnp.asarray(count, jnp.float32)

    def _keep_loss(self, seen: list[Any], metrics: list[Any]) -> list[Any]:
        return [metrics[i] if i in self._loss_at else m for i, m in enumerate(seen)]

    # Nesterov momentum: the update u is computed at y = x + mu v, so x' = y + u and v' = x' - x.

    def look_ahead(self, momentum: float) -> None:
        """Move from the stepped look-ahead point to the next one. The first call, before any step, switches this on."""
        if self._x is None:
            # A copy, because the next step may donate the arrays of the state.
            self._x = [jnp.copy(v) for v in self._state[0]]
        else:
            self._x, self._state[0] = self._leap(self._state[0], self._x, momentum)

    def _x_values(self) -> list[Array]:
        return [np.asarray(value) for value in (self._state[0] if self._x is None else self._x)]

    def set(self, vector: Array) -> None:
        """Set the trainable variables in their current buffers. With momentum, keep the velocity."""
        if self.shard is not None:
            super().set(vector)
            return
        if self._shared:
            self._state[0], self._shared = [jnp.copy(v) for v in self._state[0]], False
        if self._x is None:
            self._state[0] = self._put(self._state[0], self._vector_parts(vector))
        else:
            self._x, self._state[0] = self._shift(self._x, self._state[0], self._vector_parts(vector))
        jax.block_until_ready(self._state[0])  # XLA may read the caller's memory until the copy is complete

    def _trace_put(self, old: list[Any], parts: _Parts) -> list[Any]:
        return [jnp.array(value.reshape(v.shape), v.dtype) for value, v in zip(self._split(parts), old, strict=True)]

    def _trace_shift(self, x: list[Any], ahead: list[Any], parts: _Parts) -> tuple[list[Any], list[Any]]:
        new = self._trace_put(x, parts)
        return new, [to + (y - old) for to, y, old in zip(new, ahead, x, strict=True)]

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned, and reset the velocity to 0."""
        armed, self._x = self._x is not None, None
        super().restore(arrays)
        self._shared = False
        # A factor of 0 makes both points equal, which is a velocity of 0.
        if armed:
            self.look_ahead(0.0)

    # Variables and state.

    def _values(self, variables: list[Any]) -> list[Array]:
        positions = [self._where.get(id(v)) for v in variables]
        return [
            np.asarray(v.value if position is None else self._state[position[0]][position[1]])
            for v, position in zip(variables, positions, strict=True)
        ]

    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            if (
                id(variable) not in self._where
            ):  # a second optimizer's variable that the model does not list: no step changes it
                variable.assign(array)
                continue
            if self.shard is not None and self.shard.write(variable, array):
                continue
            part, i = self._where[id(variable)]
            old = self._state[part][i]
            # Copy here: JAX could alias the caller's memory, or copy it after this call has returned.
            copy = np.array(array, dtype=old.dtype).reshape(old.shape)
            self._state[part][i] = jax.device_put(copy, None if self.spread is None else old.sharding)

    def _names_of_results(self) -> frozenset[str]:
        if not self._compiles:
            return super()._names_of_results()
        with keras.StatelessScope():  # only traced: computed results would cost a compilation without need
            return frozenset(flattened(jax.eval_shape(self.model.get_metrics_result)))

    def reset_metrics(self) -> None:
        """Reset the metrics and the losses of batches."""
        super().reset_metrics()
        self._state[3] = self._taken(self.metric_variables)

    def _results(self) -> dict[str, Any]:
        self._bring(3)
        return super()._results()

    def _settle(self) -> None:
        if self._x is not None:
            self._state[0], self._x = self._x, None
        for part in range(len(self._variables)):
            self._bring(part)

    def _bring(self, part: int) -> None:
        for variable, value in zip(self._variables[part], self._state[part], strict=True):
            variable.assign(value if self.spread is None else np.asarray(value))


def copied(array: Array) -> jax.Array:
    """Return a JAX array in memory that XLA allocated. The given memory is no longer read after the return.

    A step can update this memory in place if it is donated. ``jax.device_put`` would use the given memory, also with
    ``may_alias=False``.
    """
    return jax.block_until_ready(jnp.array(array, copy=True))


def shared(array: Array) -> jax.Array:
    """Return a JAX array that uses the memory of the given one, if this is aligned to 64 bytes."""
    return jax.device_put(array)


def clear() -> None:
    """Free all compiled programs of this process, and return their memory to the operating system."""
    jax.clear_caches()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Unchanged:
    """A placeholder for an output of a compiled step that equals one of its inputs."""

    index: int


def _unchanged(inputs: list[Any], outputs: Any) -> Any:
    """Replace each traced output that is one of the inputs by a placeholder."""
    placeholders = {id(value): _Unchanged(index) for index, value in enumerate(inputs)}
    return jax.tree_util.tree_map(lambda leaf: placeholders.get(id(leaf), leaf), outputs)


def _operations(program: Any) -> set[str]:
    """Return the names of all primitives of a jaxpr, also of those within loops, conditions and calls."""
    names = set()
    for equation in program.eqns:
        names.add(str(equation.primitive.name))
        parameters = [
            value for part in equation.params.values() for value in (part if isinstance(part, tuple) else [part])
        ]
        for inner in (getattr(value, "jaxpr", value) for value in parameters):
            if hasattr(inner, "eqns"):
                names |= _operations(inner)
    return names


def _leap(stepped: list[Any], x: list[Any], momentum: jax.Array) -> tuple[list[Any], list[Any]]:
    return stepped, [s + momentum * (s - old) for s, old in zip(stepped, x, strict=True)]


def _rows(data: tuple[Any, ...]) -> int:
    return int(jax.tree_util.tree_leaves(data[0])[0].shape[0])
