"""The replica on TensorFlow.

A local step is one ``tf.function``. A reduced step has two: forward and backward pass, and the optimizer's update. The
local step and the passes are compiled by XLA if the model is (``jit_compile``), as in Keras. The update is also
compiled by XLA for a large model with few variables on the CPU. This took two thirds of the time for Adam.

The gradient of an embedding is converted to a dense matrix, as on JAX and PyTorch. Plain Keras on TensorFlow passes
single rows to the optimizer. Its squares and norms then differ for rows that occur twice in a batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from choros.backends.base import BaseReplica
from choros.backends.gradient_capture import Capture
from choros.backends.metrics import UNUSED, LossSample
from choros.backends.optimizers import model_variables
from choros.backends.step_windows import window_length
from choros.data.encoded_rows import form, is_ragged, ragged_parts
from choros.types import Array, Batch, aligned, aligned_copy

ALIGNMENT = 64  # bytes; TensorFlow's kernels crash on memory with another alignment
FEW, LARGE = (
    40,
    100_000,
)  # variables, values: XLA takes 40 ms to compile the update of a variable; small models gain nothing
KINDS = 8  # most traces of one step, for batches of different structure, dtypes and shapes of a row
ROWS = -1  # the divisor in a traced step that divides by rows; the trace does not know their number


class TensorFlowReplica(BaseReplica):
    """A compiled Keras model on TensorFlow; see ``choros.backends.replica.Replica``.

    Args:
        model: a compiled ``keras.Model``.
        workers: number of workers that train.
    """

    def __init__(self, model: keras.Model, workers: int = 1) -> None:
        super().__init__(model, workers)
        self._points: list[Any] | None = None  # x, with momentum; the model's variables hold the look-ahead point
        self._held_points: list[Any] = []
        self._window: tf.types.experimental.ConcreteFunction | None = None  # that ``window`` has chosen
        self._absent: frozenset[int] = frozenset()
        self._share = 1.0

    def _built(self) -> None:
        if self._capture is not None:
            return
        model = self.model
        self._capture = Capture(model, self.trainable, where=tf.compat.v1.get_default_graph)
        parts = [] if model._compile_loss is None or model.run_eagerly else model._compile_loss.metrics
        self._output_losses = [v.value for metric in parts for v in (metric.total, metric.count)]
        self._train = self._batched(lambda data: model.train_step(data))
        self._windows: dict[Any, tf.types.experimental.ConcreteFunction | None] = {}
        self._differentiate = self._batched(self._trace_gradients)
        self._differentiate_kept = self._batched(self._trace_revocable)
        self._again: _Batched | None = None
        self._mark: list[Any] = []  # the last mark, which the next gradients fill
        self._test = self._batched(self._trace_test)
        self._foretell = self._batched(lambda data: model.predict_step(data))
        self._on_host = all("CPU" in v.value.device for v in self.trainable)
        pays = self._on_host and len(self.trainable) <= FEW and self.size >= LARGE
        self._by_xla = bool(model.jit_compile or pays)
        self._update: tf.types.experimental.ConcreteFunction | None = None  # traced at the first call
        # With XLA this takes nearly twice the time.
        self._leap = self._trace_leap if model.run_eagerly else self._compiled(self._trace_leap, False)
        self._aligned: Array | None = None

    def _compiled(self, step: Callable[..., Any], xla: bool) -> tf.types.experimental.PolymorphicFunction:
        return tf.function(step, autograph=False, reduce_retracing=True, jit_compile=xla)

    def _batched(self, step: Callable[..., Any]) -> _Batched:
        return _Batched(step, None if self.model.run_eagerly else self._compiled(step, self.model.jit_compile))

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out``; zeros for a batch without rows."""
        self._share = batch.rows / max(batch.total, 1)
        super().gradients(batch, out)

    def evaluate(self, batch: Batch) -> None:
        """Run one test step: update the metrics and add one row to the losses of batches."""
        self._share = batch.rows / max(batch.total, 1)
        super().evaluate(batch)

    # One batch.

    def _placed(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        placed: tuple[Any, ...] = keras.tree.map_structure(to_tensor, data)
        return placed

    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        return self._custom(self._train(data))

    def window(self, batch: Batch, most: int) -> int:
        """Return how many steps one program makes; see ``Replica``.

        XLA for the CPU takes eight times as long for a convolution within a loop. TensorFlow's own kernels do not.
        """
        length = window_length(self.model, self.size, batch, most) if self._on_host else 1
        if length == 1:
            return 1
        tensors = keras.tree.map_structure(to_tensor, self.pack(batch))
        kind = (length, self._points is None, *(_form(leaf) for leaf in keras.tree.flatten(tensors)))
        if kind not in self._windows:
            self._windows[kind] = self._traced_window([keras.tree.map_structure(_any_rows, tensors)] * length)
        self._window = self._windows[kind]
        return 1 if self._window is None else length

    def steps(self, batches: Sequence[Batch], window: int, momentum: float = 0.0) -> None:
        """Run one step for each batch, up to ``window``, as one program; see ``Replica``."""
        if window == 1 or self._window is None:
            super().steps(batches, window, momentum)
            return
        data = [keras.tree.map_structure(to_tensor, self._packed(batch)) for batch in batches]
        rest = data[-1:] * (window - len(data))
        self._window(tf.constant(len(data)), scalar(momentum, self.dtype.name), [*data, *rest])
        self._logs = None
        self._rows += sum(batch.rows for batch in batches)

    def _traced_window(self, batches: list[Any]) -> tf.types.experimental.ConcreteFunction | None:
        """Trace a window of steps; return None if it would be slow, or if its steps have logs besides the metrics."""
        logs_more: list[bool] = []

        def steps(count: tf.Tensor, momentum: tf.Tensor, batches: list[Any]) -> None:
            # More batches than ``count`` are not used: they let one program make any number of steps.
            stacked = keras.tree.map_structure(lambda *leaves: tf.stack(leaves), *batches)

            def step(number: tf.Tensor) -> tf.Tensor:
                logs = self.model.train_step(keras.tree.map_structure(lambda leaves: leaves[number], stacked))
                logs_more.append(self._custom(logs) is not None)
                if self._points is not None:
                    self._trace_leap(momentum)
                return number + 1

            # Steps change variables, so they must not overlap.
            tf.while_loop(lambda number: number < count, step, [tf.constant(0)], parallel_iterations=1)

        xla = self.model.jit_compile
        numbers = tf.TensorSpec([], tf.int32), tf.TensorSpec([], self.dtype.name)
        traced: Any = self._compiled(steps, xla).get_concrete_function(*numbers, batches)
        if any(logs_more) or (xla and any("Conv" in name for name in operation_names(traced.graph))):
            traced.graph._function_captures = None  # see ``close``
            return None
        return traced

    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], LossSample, float]:
        if self.revocable or self.repeats:
            before, after, (grads, loss, n, logs) = self._differentiate_kept(data, scalar(self._share))
            self._mark += before
            self._mark, self._after = [], None if after is None else after.numpy()
        else:
            grads, loss, n, logs = self._differentiate(data, scalar(self._share))
        self._logs = self._custom(logs)
        divisor = float(n)
        arrays = [None if g is None else np.asarray(g) for g in grads]
        return arrays, LossSample(*loss.numpy().tolist()), float(rows) if divisor == ROWS else divisor

    def attempt(self, data: tuple[Any, ...], rows: int, afresh: bool) -> tuple[list[Array | None], float]:
        """Run a trial step eagerly; see ``BaseReplica``."""
        tensors = keras.tree.map_structure(to_tensor, data)
        grads, _, n, logs = self._trace_gradients(tensors, scalar(1.0))
        self._logs = self._custom(logs)
        divisor = float(n)
        arrays = [None if g is None else np.asarray(g) for g in grads]
        return arrays, float(rows) if divisor == ROWS else divisor

    def structure(self, data: tuple[Any, ...], rows: int) -> str | None:
        """Find values that depend on the update; see ``BaseReplica``.

        The step is traced. Operations after the update are searched for inputs that the update changes.
        """
        if self.model.run_eagerly:
            return None
        assert self._capture is not None  # noqa: S101 - for the type checker
        made: list[int] = []  # number of operations in the graph when the step passed its gradients

        def step(data: tuple[Any, ...]) -> None:
            with capture:
                self.model.train_step(data)

        capture, graph_of = self._capture, tf.compat.v1.get_default_graph
        capture.then = lambda: made.append(len(graph_of().get_operations()))
        try:
            tensors = keras.tree.map_structure(to_tensor, data)
            graph = tf.function(step, autograph=False).get_concrete_function(tensors).graph
        finally:
            capture.then = lambda: None
        if len(made) != 1:
            return None
        variables = [*self.trainable, *self.model.optimizer.variables]
        rate = self.model.optimizer.learning_rate
        paths = {id(v.value.handle): v.path for v in variables if v is not rate}
        names = {inside.name: paths[id(outside)] for outside, inside in graph.captures if id(outside) in paths}
        for operation in graph.get_operations()[made[0] :]:
            for tensor in operation.inputs:
                if tensor.name in names:
                    return str(names[tensor.name])
        return ""

    def _trace_gradients(self, data: tuple[Any, ...], share: tf.Tensor) -> tuple[Any, ...]:
        assert self._capture is not None  # noqa: S101 - for the type checker
        with self._capture as capture, self.weigher, self._part_of(share), self._own_loss() as loss:
            logs = self.model.train_step(data)
            pairs = zip(capture.gradients(), self.trainable, strict=True)
            grads = [None if g is None else tf.cast(_dense(g, v), self.dtype) for g, v in pairs]
            n = tf.cast(self.weigher.divisor(ROWS, data), tf.float32)
            return grads, loss(), n, logs

    def _trace_revocable(self, data: tuple[Any, ...], share: tf.Tensor) -> tuple[Any, ...]:
        """Trace the gradients, the values of changed variables before the step, and of metric variables after it.

        All are in one program, since a read of one variable outside of it takes as long as a small layer.
        """
        before = [tf.identity(variable.value.read_value()) for variable in self._changing()]
        result = self._trace_gradients(data, share)
        after = [
            tf.cast(tf.reshape(variable.value.read_value(), [-1]), tf.float64) for variable in self.metric_variables
        ]
        return before, tf.concat(after, 0) if after else None, result

    def _marked(self) -> list[Any]:
        self._mark = []
        return self._mark

    def _go_to(self, values: list[Any]) -> None:
        if values:  # an empty mark: the batch had no rows, and nothing has changed
            super()._go_to([value.numpy() if isinstance(value, tf.Tensor) else value for value in values])

    def _apply(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        self._leave_out(absent)
        inputs = self._borrow(gradient), scalar(divisor, self.dtype.name)
        if self._update is not None:
            self._update(*inputs)
            return
        if self.model.run_eagerly:
            self._trace_update(*inputs)
            return
        try:
            traced = self._compiled(self._trace_update, self._by_xla).get_concrete_function(*inputs)
            traced(*inputs)
        except tf.errors.OpError:  # XLA cannot compile this optimizer; no variable was updated
            traced = self._compiled(self._trace_update, False).get_concrete_function(*inputs)
            traced(*inputs)
        self._update = traced

    def _leave_out(self, absent: frozenset[int]) -> None:
        """Drop the traces of the update if the set of variables without a gradient has changed."""
        if absent != self._absent:
            # A trace has a fixed list of gradients, with None for variables that have none.
            self._absent, self._update, self._again = absent, None, None

    def _trace_update(self, flat: tf.Tensor, divisor: tf.Tensor) -> None:
        self.model.optimizer.apply(self._divided(flat, divisor), self.trainable)

    def _repeat(self, data: tuple[Any, ...], gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        self._leave_out(absent)
        if self._again is None:
            self._again = self._batched(self._trace_repeat)
        inputs = self._borrow(gradient), scalar(divisor, self.dtype.name)
        self._logs = self._custom(self._again(data, scalar(self._share), *inputs))

    def _trace_repeat(self, data: tuple[Any, ...], share: tf.Tensor, flat: tf.Tensor, divisor: tf.Tensor) -> Any:
        assert self._capture is not None  # noqa: S101 - for the type checker
        self._capture.gives = self._divided(flat, divisor)
        try:
            with self._capture, self._part_of(share), self._own_loss():
                return self.model.train_step(data)
        finally:
            self._capture.gives = None

    def _divided(self, flat: tf.Tensor, divisor: tf.Tensor) -> list[Any]:
        """Divide the flat gradient and split it into tensors of the variables' shapes and dtypes."""
        parts = tf.split(flat, [int(np.prod(v.shape, dtype=np.int64)) for v in self.trainable])
        grads = [
            tf.cast(tf.reshape(part / divisor, v.shape), v.dtype) for part, v in zip(parts, self.trainable, strict=True)
        ]
        return [None if i in self._absent else grad for i, grad in enumerate(grads)]

    def _borrow(self, vector: Array) -> tf.Tensor:
        """Return the vector as a tensor, without a copy if its memory is aligned and on the host."""
        if not self._on_host:
            return tf.convert_to_tensor(vector)
        address = vector.ctypes.data
        if address % ALIGNMENT or not vector.flags.c_contiguous:
            if self._aligned is None:
                self._aligned = aligned(self.size, self.dtype)
            np.copyto(self._aligned, vector)
            vector = self._aligned
        elif not vector.flags.writeable:  # numpy exports no read-only array by DLPack; this memory is only read
            memory: Any = (ctypes.c_char * vector.nbytes).from_address(address)
            vector = np.frombuffer(memory, vector.dtype)
        return tf.experimental.dlpack.from_dlpack(vector.__dlpack__())

    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[LossSample, float]:
        with self._at_x():
            loss, n, logs = self._test(data, scalar(self._share))
        self._logs = self._custom(logs)
        divisor = float(n)
        return LossSample(*loss.numpy().tolist()), float(rows) if divisor == ROWS else divisor

    def _trace_test(self, data: tuple[Any, ...], share: tf.Tensor) -> tuple[Any, ...]:
        with self.weigher, self._part_of(share), self._own_loss() as loss:
            logs = self.model.test_step(data)
            return loss(), tf.cast(self.weigher.divisor(ROWS, data, strict=False), tf.float32), logs

    def _predict(self, data: tuple[Any, ...]) -> Any:
        with self._at_x():
            return self._foretell(data)

    @contextmanager
    def _own_loss(self) -> Iterator[Callable[[], Any]]:
        """Yield a function that returns the loss of one batch from Keras' running mean; then restore the mean."""
        metric = self.loss_metric
        if metric is None:
            yield lambda: tf.constant([UNUSED, 0.0])
            return
        state = [metric.total.value, metric.count.value]
        before = [variable.read_value() for variable in state]
        for variable in state:
            variable.assign(tf.zeros_like(variable))

        def loss() -> tf.Tensor:
            total, count = (variable.read_value() for variable in state)
            return tf.cast([tf.where(count == 0, tf.cast(UNUSED, total.dtype), total / count), count], tf.float32)

        yield loss
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)

    @contextmanager
    def _part_of(self, share: tf.Tensor) -> Iterator[None]:
        """Multiply what a step adds to the losses of outputs by this rank's share of the rows.

        Keras counts the loss of each output once for a batch if the number of rows is unknown in the trace. With the
        shares, the ranks together count it once.
        """
        before = [variable.read_value() for variable in self._output_losses]
        for variable in self._output_losses:
            variable.assign(tf.zeros_like(variable))
        yield
        for variable, value in zip(self._output_losses, before, strict=True):
            variable.assign(value + tf.cast(share, variable.dtype) * variable)

    # Variables.

    def _values(self, variables: list[Any]) -> list[Array]:
        return [read(v.value) for v in variables]

    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            if self.shard is not None and self.shard.write(variable, array):
                continue
            target = variable.value
            target.assign(tf.constant(np.asarray(array), target.dtype))

    def close(self) -> None:
        """Release the variables that traces have captured: the graph of a trace is never garbage-collected."""
        super().close()
        if self._capture is None:
            return
        for shard in (self.shard, self.idle_shard):
            if shard is not None:
                shard.close()
        steps = [self._train, self._differentiate, self._differentiate_kept, self._test, self._foretell]
        steps += [] if self._again is None else [self._again]
        traces = [trace for step in steps for trace in step.take_traces()]
        for trace in [*traces, self._update, *self._windows.values()]:
            if trace is not None:
                trace.graph._function_captures = None
        self._update = self._window = None
        self._windows = {}

    @property
    def reusable(self) -> bool:
        """True if no trace has state besides the model's variables; see ``BaseReplica``."""
        if self.altered or self.model.run_eagerly or self._capture is None:
            return False
        model = self.model
        held = [*model_variables(model), *model.metrics_variables]
        parts = [] if model._compile_loss is None else model._compile_loss.metrics
        held += [variable for metric in parts for variable in metric.variables]
        known = {id(variable.value.handle) for variable in held}
        steps = [self._train, self._differentiate, self._differentiate_kept, self._test]
        traces = [*(trace for step in steps for trace in step.traces()), *filter(None, self._windows.values())]
        return all(stateless(trace.graph, known) for trace in traces)

    # Momentum.

    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step: ``v <- mu v + u``, ``x <- x + v``, continue from ``x + mu v``.

        The step started at ``x + mu v``. Its result is therefore the new x, and the new v is the change of x. The first
        call, before any step, switches momentum on.
        """
        if self._points is None:
            # A trace holds the variables of its first run, so another fit must use them too.
            self._points = self._held_points = self._held_points or [tf.Variable(v.value) for v in self.trainable]
            for x, variable in zip(self._points, self.trainable, strict=True):
                x.assign(variable.value)
        else:
            self._leap(np.asarray(momentum, self.dtype))

    def _trace_leap(self, momentum: tf.Tensor | Array) -> None:
        for variable, x in zip(self.trainable, self._points or [], strict=True):
            stepped = variable.value.read_value()
            ahead = stepped + tf.cast(momentum, stepped.dtype) * (stepped - x)
            x.assign(stepped)
            variable.value.assign(ahead)

    def _x_values(self) -> list[Array]:
        return super()._x_values() if self._points is None else [read(point) for point in self._points]

    def set(self, vector: Array) -> None:
        """Set the trainable variables to a copy of the vector, and move the look-ahead point by the same difference."""
        points = self._points or []
        offsets = [variable.value - x for variable, x in zip(self.trainable, points, strict=False)]
        super().set(vector)
        for variable, x, offset in zip(self.trainable, points, offsets, strict=False):
            x.assign(variable.value)
            variable.value.assign_add(offset)

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned, and reset the velocity to 0."""
        points, self._points = self._points, None
        super().restore(arrays)
        for variable, x in zip(self.trainable, points or [], strict=False):
            x.assign(variable.value)
        self._points = points

    @contextmanager
    def _at_x(self) -> Iterator[None]:
        """Temporarily set the variables to x instead of the look-ahead point."""
        pairs = list(zip(self.trainable, self._points or [], strict=False))
        ahead = [variable.value.read_value() for variable, _ in pairs]
        for variable, x in pairs:
            variable.value.assign(x)
        try:
            yield
        finally:
            for (variable, _), value in zip(pairs, ahead, strict=True):
                variable.value.assign(value)

    def _settle(self) -> None:
        for variable, x in zip(self.trainable, self._points or [], strict=False):
            variable.value.assign(x)
        self._points = None


class _Batched:
    """A step on batches. It is traced with an unknown number of rows, as in ``fit``, once for each kind of batch.

    The traces are called directly: the lookup in ``tf.function`` costs about 0.1 ms for each step.
    """

    def __init__(self, step: Callable[..., Any], function: tf.types.experimental.PolymorphicFunction | None) -> None:
        self._step, self._function = step, function
        self._traces: dict[Any, Any] = {}

    def __call__(self, data: tuple[Any, ...], *more: Any) -> Any:
        tensors = keras.tree.map_structure(to_tensor, data)
        if self._function is None:
            return self._step(tensors, *more)
        kind = tuple(_form(leaf) for leaf in keras.tree.flatten(data))
        if kind not in self._traces:
            if len(self._traces) == KINDS:  # many shapes, such as lengths of sentences: TensorFlow relaxes more axes
                return self._function(tensors, *more)
            opened = keras.tree.map_structure(_any_rows, tensors)
            self._traces[kind] = self._function.get_concrete_function(opened, *more)
        return self._traces[kind](tensors, *more)

    def traces(self) -> list[Any]:
        """Return the traces."""
        return list(self._traces.values())

    def take_traces(self) -> list[Any]:
        """Return the traces, and remove them from this step."""
        traces, self._traces = list(self._traces.values()), {}
        return traces


# Operations that TensorFlow counts as stateful, and whose only state is that of variables.
_ON_VARIABLES = ("ReadVariable", "Assign", "Resource", "Var", "StatefulPartitionedCall", "While", "If", "Case")


def stateless(graph: tf.Graph, known: Collection[int]) -> bool:
    """Return whether a traced step depends on nothing but its inputs and known variables, and changes nothing else.

    A random operation of TensorFlow has a seed and a counter of its own, and a call of Python may have any state.

    Args:
        graph: the graph of the trace.
        known: ids of the known variables' handles.
    """
    if any(id(variable.handle) not in known for variable in graph.variables):
        return False
    names = {name for name in operation_names(graph) if not name.startswith(_ON_VARIABLES)}
    # A call of a function of this graph has no definition in the registry. The nodes of that function are in the list.
    definitions = [op_def_registry.get(name) for name in names]
    return not any(operation is not None and operation.is_stateful for operation in definitions)


def operation_names(graph: tf.Graph, *, nested: bool = False) -> set[str]:
    """Return the names of all operations of a graph; of those within loops and conditions alone if ``nested``."""
    definition = graph.as_graph_def()
    functions = attrgetter("library.function")(definition)  # such as the bodies of loops and conditions
    nodes = [*([] if nested else definition.node), *(node for function in functions for node in function.node_def)]
    return {node.op for node in nodes}


@functools.lru_cache(maxsize=256)
def scalar(value: float, dtype: str = "float32") -> tf.Tensor:
    """Return a tensor of one value; equal calls return the same tensor."""
    return tf.constant(value, dtype)


def to_tensor(leaf: object) -> object:
    """Return a leaf of a batch as a tensor. None and a leaf of a batch that was made ready stay as they are."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if is_ragged(leaf):  # the stubs of TensorFlow do not have from_tensor
        return tf.RaggedTensor.from_tensor(*ragged_parts(leaf))  # pyright: ignore[reportAttributeAccessIssue]
    return tf.constant(leaf)


def _form(leaf: Any) -> Any:
    """Return the dtype and the shape of a row of an array or a tensor; None stays None."""
    if leaf is None:
        return None
    if isinstance(leaf, np.ndarray):
        return form(leaf)
    return type(leaf), leaf.dtype, tuple(leaf.shape.as_list()[1:])


def _any_rows(leaf: Any) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None, *leaf.values.shape[1:]], leaf.dtype, 1, leaf.row_splits.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def copied(array: Array) -> tf.Tensor:
    """Return a tensor that holds a copy of an array. A variable can use its memory, without a second copy."""
    return shared(aligned_copy(array))


def shared(array: Array) -> tf.Tensor:
    """Return a tensor that uses the memory of an array, which must be aligned to 64 bytes."""
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except (BufferError, TypeError):  # DLPack does not support the dtype, such as bfloat16
        return tf.constant(array)


def read(variable: tf.Variable) -> Array:
    """Return a view of the variable's memory. While the view exists, TensorFlow copies the memory before it writes."""
    return np.asarray(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def _dense(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable) -> tf.Tensor:
    """Convert the sparse gradient of an embedding to a dense matrix, which the ranks can sum."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
    return gradient


@contextmanager
def eagerly() -> Iterator[None]:
    """Temporarily run functions of ``tf.function`` eagerly."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def weights_detector(model: keras.Model) -> Callable[[Any], bool]:
    """Return a predicate that is True for TensorFlow objects that may give access to the model's weights."""
    values = {id(variable.value) for variable in model_variables(model)}
    kinds = (tf.Module, tf.train.Checkpoint, tf.types.experimental.GenericFunction)

    def detect(candidate: object) -> bool:
        return id(candidate) in values or (isinstance(candidate, kinds) and not isinstance(candidate, tf.Variable))

    return detect
