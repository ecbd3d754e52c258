"""The replica on TensorFlow.

A step, its first half (forward and backward) and its second (the optimizer) are each one ``tf.function``. The first
two are compiled by XLA where the model is (``jit_compile``), as in Keras. The optimizer's half is compiled by XLA
also where the model is not, if it has few variables: the same arithmetic in a third less time, measured on Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from choros.backend.base import BaseReplica
from choros.backend.capture import Capture
from choros.types import Array, Batch

ALIGNMENT = 64  # bytes; TensorFlow's kernels end the process on memory that begins elsewhere
FEW = 40  # trainable variables; XLA takes some 40 ms to compile the optimizer's step of each
ROWS = -1  # stands for the batch's rows where a traced step divides by them


class TensorFlowReplica(BaseReplica):
    """A compiled Keras model on TensorFlow; see ``choros.backend.replica.Replica``.

    Args:
        model: a compiled ``keras.Model``.
        workers: how many workers train together.
    """

    def __init__(self, model: Any, workers: int = 1) -> None:
        super().__init__(model, workers)
        self._points: list[Any] | None = None
        self._velocity: list[Any] = []
        self._momentum = 0.0
        self._capture: Capture | None = None
        self._proved = False

    def _built(self) -> None:
        if self._capture is not None:
            return
        model = self.model
        self._capture = Capture(model, self.trainable, where=tf.compat.v1.get_default_graph)
        self._train = self._compiled(lambda data: model.train_step(data), model.jit_compile)
        self._differentiate = self._compiled(self._trace_gradients, model.jit_compile)
        self._test = self._compiled(self._trace_test, model.jit_compile)
        self._on_host = all("CPU" in v.value.device for v in self.trainable)
        small = self._on_host and len(self.trainable) <= FEW
        self._update = self._compiled(self._trace_update, model.jit_compile or small)
        self._leap = self._compiled(self._trace_leap, False)
        room = np.empty(self.size * self.dtype.itemsize + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self._aligned: Array = room[start : start + self.size * self.dtype.itemsize].view(self.dtype)

    def _compiled(self, step: Callable[..., Any], xla: bool) -> Callable[..., Any]:
        if self.model.run_eagerly:
            return step
        function: Callable[..., Any] = tf.function(step, autograph=False, reduce_retracing=True, jit_compile=xla)
        return function

    def pack(self, batch: Batch) -> tuple[Any, ...]:
        """The packed batch as tensors."""
        return tuple(keras.tree.map_structure(_tensor, part) for part in super().pack(batch))

    # One batch.

    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        return self._custom(self._train(data))

    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], float, float]:
        grads, loss, n, logs = self._differentiate(data)
        self._logs = self._custom(logs)
        divisor = float(n)
        arrays = [None if g is None else np.asarray(g) for g in grads]
        return arrays, float(loss), float(rows) if divisor == ROWS else divisor

    def _trace_gradients(self, data: tuple[Any, ...]) -> Any:
        assert self._capture is not None  # noqa: S101 - for the type checker
        with self._capture as capture, self.weigher, self._own_loss() as loss:
            logs = self.model.train_step(data)
            pairs = zip(capture.gradients(), self.trainable, strict=True)
            grads = [None if g is None else tf.cast(_dense(g, v), self.dtype) for g, v in pairs]
            n = tf.cast(self.weigher.divisor(ROWS), tf.float32)
            return grads, loss(), n, logs

    def _apply(self, gradient: Array, divisor: float) -> None:
        flat, n = self._borrow(gradient), np.asarray(divisor, self.dtype)
        if self._proved:
            self._update(flat, n)
            return
        try:
            self._update(flat, n)
        except tf.errors.OpError:  # XLA cannot compile this optimizer; nothing was updated
            if self.model.run_eagerly:
                raise
            self._update = self._compiled(self._trace_update, False)
            self._update(flat, n)
        self._proved = True

    def _trace_update(self, flat: Any, divisor: Any) -> None:
        parts = tf.split(flat, [int(np.prod(v.shape, dtype=np.int64)) for v in self.trainable])
        grads = [
            tf.cast(tf.reshape(part / divisor, v.shape), v.dtype) for part, v in zip(parts, self.trainable, strict=True)
        ]
        self.model.optimizer.apply(grads, self.trainable)

    def _borrow(self, vector: Array) -> Any:
        """The vector as a tensor, without a copy where its memory is fit for that."""
        if not self._on_host:
            return tf.convert_to_tensor(vector)
        if vector.ctypes.data % ALIGNMENT or not vector.flags.writeable or not vector.flags.c_contiguous:
            np.copyto(self._aligned, vector)
            vector = self._aligned
        return tf.experimental.dlpack.from_dlpack(vector.__dlpack__())

    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[float, float]:
        with self._at_x():
            loss, n, logs = self._test(data)
        self._logs = self._custom(logs)
        divisor = float(n)
        return float(loss), float(rows) if divisor == ROWS else divisor

    def _trace_test(self, data: tuple[Any, ...]) -> Any:
        with self.weigher, self._own_loss() as loss:
            logs = self.model.test_step(data)
            return loss(), tf.cast(self.weigher.divisor(ROWS, strict=False), tf.float32), logs

    @contextmanager
    def _own_loss(self) -> Iterator[Callable[[], Any]]:
        """One batch's loss out of Keras' running mean, which is left as it was."""
        metric = self.loss_metric
        if metric is None:
            yield lambda: tf.constant(float("nan"))
            return
        state = [metric.total.value, metric.count.value]
        before = [variable.read_value() for variable in state]
        for variable in state:
            variable.assign(tf.zeros_like(variable))

        def loss() -> Any:
            return tf.cast(tf.math.divide_no_nan(state[0].read_value(), state[1].read_value()), tf.float32)

        yield loss
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)

    # Variables.

    def _values(self, variables: list[Any]) -> list[Array]:
        return [np.asarray(v.value.read_value()) for v in variables]

    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            target = variable.value
            target.assign(tf.constant(np.asarray(array), target.dtype))

    # Momentum.

    def look_ahead(self, momentum: float) -> None:
        """Nesterov momentum around the step: ``v <- mu v + u``, ``x <- x + v``, go on from ``x + mu v``.

        The step began at ``x + mu v``, so where it ended is the new x, and the new v is what x moved by. The first
        call, before any step, arms it.
        """
        self._momentum = momentum
        if self._points is None:
            self._points = [tf.Variable(v.value) for v in self.trainable]
            self._velocity = [tf.Variable(tf.zeros_like(v.value)) for v in self.trainable]
        else:
            self._leap(np.asarray(momentum, self.dtype))

    def _trace_leap(self, momentum: Any) -> None:
        for variable, x, velocity in zip(self.trainable, self._points or [], self._velocity, strict=True):
            stepped = variable.value.read_value()
            moved = stepped - x
            velocity.assign(moved)
            x.assign(stepped)
            variable.value.assign(stepped + tf.cast(momentum, moved.dtype) * moved)

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out``: x, where momentum looks ahead."""
        if self._points is None:
            super().get(out)
        else:
            for where, point in zip(self.slices, self._points, strict=True):
                out[where] = np.asarray(point.read_value()).reshape(-1)

    def set(self, vector: Array) -> None:
        """Set the trainable variables, and look ahead from there; always copies."""
        super().set(vector)
        for variable, x, velocity in zip(self.trainable, self._points or [], self._velocity, strict=False):
            x.assign(variable.value)
            variable.value.assign_add(tf.cast(self._momentum, velocity.dtype) * velocity)

    def restore(self, arrays: list[Array]) -> None:
        """Set what ``snapshot`` gave; a velocity is forgotten."""
        points, self._points = self._points, None
        super().restore(arrays)
        if points is not None:
            self._points = points
            for variable, x, velocity in zip(self.trainable, points, self._velocity, strict=True):
                x.assign(variable.value)
                velocity.assign(tf.zeros_like(velocity))

    @contextmanager
    def _at_x(self) -> Iterator[None]:
        """For a while, leave the look-ahead point."""
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
        self._points, self._velocity = None, []


def _tensor(leaf: Any) -> Any:
    return None if leaf is None else tf.constant(leaf)


def _dense(gradient: Any, variable: Any) -> Any:
    """An embedding's gradient of a few rows as the whole matrix that every rank can add."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
    return gradient
