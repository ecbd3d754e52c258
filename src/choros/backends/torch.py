"""The replica on PyTorch.

As in Keras, steps run eagerly unless the model was compiled with ``jit_compile=True``. Then ``torch.compile`` compiles
the local step, the forward and backward pass, and the optimizer's update. PyTorch's default process group is not used:
if it exists, Keras 3.16 wraps the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from choros.backends import seed_state, step_counter
from choros.backends.base import BaseReplica
from choros.backends.gradient_capture import Capture
from choros.backends.metrics import UNUSED, LossSample
from choros.backends.model_watch import ModelWatch
from choros.backends.optimizers import model_variables
from choros.backends.recorded_step.torch import NotRecordableError, RecordedStep, forget_losses
from choros.cluster.hardware.array_threads import with_number
from choros.errors import InexactLossError
from choros.types import Array, aligned_copy

_PLAIN = tuple(np.dtype(kind).str for kind in ("float32", "float64", "int64", "int32", "uint8", "bool"))


class TorchReplica(BaseReplica):
    """A compiled Keras model on PyTorch; see ``choros.backends.replica.Replica``.

    Args:
        model: a compiled ``keras.Model``.
        workers: number of workers that train.
    """

    def __init__(self, model: keras.Model, workers: int = 1) -> None:
        super().__init__(model, workers)
        self._points: list[Any] | None = None
        self._momentum = 0.0
        self._shares_memory = False
        self._watch: _Watch | None = None
        self._trial = False  # whether a trial runs, whose steps are not recorded

    def _built(self) -> None:
        if self._capture is not None:
            return
        compiled: Callable[[Any], Any] = torch.compile if self.model.jit_compile else lambda step: step
        self._capture = Capture(self.model, self.trainable, wrap=torch.compiler.disable)
        self._train = compiled(lambda data: self.model.train_step(data))
        self._differentiate = compiled(lambda data: self.model.train_step(data))
        self._test = compiled(lambda data: self.model.test_step(data))
        self._foretell = compiled(lambda data: self.model.predict_step(data))
        self._update = compiled(lambda grads: self.model.optimizer.apply(list(grads), self.trainable))
        self._flat = torch.empty(self.size, dtype=getattr(torch, self.dtype.name))
        self._host: Array = self._flat.numpy()
        values = [v.value for v in self.trainable]
        parts = self._flat.split([value.numel() for value in values])
        self._parts = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        # Gradients must have the variable's dtype and device. On the CPU with equal dtypes, views of the vector
        # suffice.
        self._cast = [value for value in values if value.dtype != self._flat.dtype or value.device.type != "cpu"]
        self._shares_memory = keras.ops.convert_to_tensor(np.zeros(1, np.float32)).device.type == "cpu"
        self._record_steps()
        if self.model.jit_compile:
            # The first step would be another program than all others if it cleared no gradients, or if no layer had
            # been called in this process: Keras then sets its global state.
            keras.layers.Identity(name="called")(np.zeros(1, np.float32))
            for value in values:
                value.grad = torch.zeros_like(value) if value.grad is None else value.grad

    def _record_steps(self) -> None:
        variables = [*model_variables(self.model), *self.model.metrics_variables]
        watch, compiled = ModelWatch(self.model), bool(self.model.jit_compile)
        self._recorded_step = RecordedStep(self._traced_step, variables, watch, compiled)
        self._recorded_gradients = RecordedStep(self._traced_gradients, variables, watch, compiled)
        self._recorded_update = RecordedStep(self._traced_update, variables, watch, compiled)
        self._recorded_test = RecordedStep(self._traced_test, variables, watch, compiled)

    # The steps as they are recorded. They run on tensors without data.

    def _traced_step(self, data: tuple[Any, ...]) -> list[Any]:
        """Run a local step for its record."""
        if self._custom(self.model.train_step(data)) is not None:
            raise NotRecordableError
        forget_losses(self.model)
        return []

    def _traced_gradients(self, data: tuple[Any, ...], rows: int) -> list[Any]:
        """Run a step without its update, for its record.

        Returns:
            The gradients, the divisor, total and count of the loss, the names of the logs, and their values.
        """
        assert self._capture is not None  # noqa: S101 - for the type checker
        with self._capture as capture, self.weigher, _Loss(self.loss_metric) as loss:
            logs = self._custom(self.model.train_step(data)) or {}
            forget_losses(self.model)
            tensors = all(isinstance(value, torch.Tensor) for value in logs.values())
            if logs and not (self.within_fit and tensors):
                raise NotRecordableError
            divisor = self.weigher.divisor(rows, data)
            return [*capture.gradients(), divisor, *loss.sums(), tuple(logs), *logs.values()]

    def _traced_update(self, grads: tuple[Any, ...]) -> list[Any]:
        """Run the optimizer for its record."""
        with torch.no_grad():
            self.model.optimizer.apply(list(grads), self.trainable)
        return []

    def _traced_test(self, data: tuple[Any, ...], rows: int) -> list[Any]:
        """Run a test step for its record; return the divisor, and total and count of the loss."""
        with torch.no_grad(), self.weigher, _Loss(self.loss_metric) as loss:
            if self._custom(self.model.test_step(data)) is not None:
                raise NotRecordableError
            forget_losses(self.model)
            return [self.weigher.divisor(rows, data, strict=False), *loss.sums()]

    def _leaf(self, array: Any) -> torch.Tensor:
        """Return a tensor that uses the array's memory, or a copy if the array is read-only or has negative strides."""
        if not isinstance(array, np.ndarray):
            return array
        usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        array = array if usable else array.copy()
        if self._shares_memory and array.dtype.str in _PLAIN:  # same result as Keras' conversion in a tenth of the time
            return torch.from_numpy(array)
        return keras.ops.convert_to_tensor(array)

    # One batch.

    def _step(self, data: tuple[Any, ...]) -> dict[str, Any] | None:
        self._mode(True)
        if self._recorded_step.run(data) is not None:
            return None
        train = self.model.train_step if self._recorded_step.made else self._train
        with self._recorded_step.counted():
            return self._custom(train(data))

    def _gradients(self, data: tuple[Any, ...], rows: int) -> tuple[list[Array | None], LossSample, float]:
        assert self._capture is not None  # noqa: S101 - for the type checker
        self._mode(True)
        plain = self._trial or self.watches or self.repeats
        results = None if plain else self._recorded_gradients.run(data, rows)
        if results is not None:
            count = len(self.trainable)
            divisor, total, weight = (float(number) for number in results[count : count + 3])
            self._logs = self._custom(dict(zip(results[count + 3], results[count + 4 :], strict=True)) or None)
            return [None if g is None else read(g) for g in results[:count]], _sample(total, weight), divisor
        differentiate = self.model.train_step if self._recorded_gradients.made else self._differentiate
        counted = nullcontext() if plain else self._recorded_gradients.counted()
        with counted, self._capture as capture, self._watching(), self.weigher, _Loss(self.loss_metric) as loss:
            self._logs = self._custom(differentiate(data))
            grads = [None if g is None else read(g) for g in capture.gradients()]
            return grads, _sample(*map(float, loss.sums())), float(self.weigher.divisor(rows, data))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch whether a step that is not repeated uses weights after the update; it may do so only late in training.

        Raises:
            InexactLossError: the step uses updated weights.
        """
        if not self.watches or self.model.jit_compile:
            yield
            return
        assert self._capture is not None  # noqa: S101 - for the type checker
        if self._watch is None:
            self._watch = _Watch([*self.trainable, step_counter(self.model.optimizer)])
        self._capture.then = self._watch.arm
        try:
            yield
        finally:
            self._capture.then = lambda: None
            self._watch.disarm()
        if self._watch.used is not None:
            raise InexactLossError(
                f"{type(self.model).__name__}.train_step of model {self.model.name!r} reads weights that the "
                f"optimizer has updated (it uses {self._watch.used!r} after the update), which it did not do in the "
                "trial before training. Set repeat_step = True on the model, so that AllReduce makes each step again "
                "with the sum of all gradients; or use another algorithm, such as LocalSGD."
            )

    def structure(self, data: tuple[Any, ...], rows: int) -> str | None:
        """Find a variable that is used after the update; see ``BaseReplica``.

        PyTorch has no traced program. One step runs, so only the branches that it takes are searched.
        """
        if self.model.jit_compile:
            return None
        self.watches = True
        try:
            self.left(data, rows, [0.0] * len(self.trainable))
        except InexactLossError:
            if self._watch is None or self._watch.used is None:
                raise
            return str(self._watch.used)
        finally:
            self.watches = False
        return None

    def attempt(self, data: tuple[Any, ...], rows: int, afresh: bool) -> tuple[list[Array | None], float]:
        """Run a trial step without ``torch.compile``; see ``BaseReplica``."""
        # A trial runs few times, so it would not repay the compilation.
        compiled, self._differentiate = self._differentiate, lambda batch: self.model.train_step(batch)
        self._trial = True
        try:
            return super().attempt(data, rows, afresh)
        finally:
            self._differentiate, self._trial = compiled, False

    def _apply(self, gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        grads = tuple(self._divided(gradient, divisor, absent))
        if self._recorded_update.run(grads) is None:
            update = self._traced_update if self._recorded_update.made else self._update
            with torch.no_grad(), self._recorded_update.counted():
                update(grads)

    def _divided(self, gradient: Array, divisor: float, absent: frozenset[int]) -> list[Any]:
        """Divide the flat gradient and split it into tensors of the variables' shapes, dtypes and devices."""
        with_number(np.divide, gradient, divisor, self._host)
        grads = self._parts
        if self._cast:
            grads = [part.to(v.value) for part, v in zip(grads, self.trainable, strict=True)]
        return [None if i in absent else grad for i, grad in enumerate(grads)]

    def _repeat(self, data: tuple[Any, ...], gradient: Array, divisor: float, absent: frozenset[int]) -> None:
        assert self._capture is not None  # noqa: S101 - for the type checker
        self._mode(True)
        self._capture.gives = self._divided(gradient, divisor, absent)
        try:
            with self._capture, _Loss(self.loss_metric):
                self._logs = self._custom(self._differentiate(data))
        finally:
            self._capture.gives = None

    def _evaluate(self, data: tuple[Any, ...], rows: int) -> tuple[LossSample, float]:
        self._mode(False)
        with torch.no_grad(), self._at_x():
            results = self._recorded_test.run(data, rows)
            if results is None:
                test = self.model.test_step if self._recorded_test.made else self._test
                with self._recorded_test.counted(), self.weigher, _Loss(self.loss_metric) as loss:
                    self._logs = self._custom(test(data))
                    results = [self.weigher.divisor(rows, data, strict=False), *loss.sums()]
            divisor, total, count = map(float, results)
            return _sample(total, count), divisor

    def _predict(self, data: tuple[Any, ...]) -> Any:
        self._mode(False)
        with torch.no_grad(), self._at_x():
            return self._foretell(data)

    def _mode(self, training: bool) -> None:
        if self.model.training is not training:
            self.model.train(training)

    # Variables.

    def _values(self, variables: list[Any]) -> list[Array]:
        return [read(v.value.detach()) for v in variables]

    def _assign(self, variables: list[Any], arrays: list[Any]) -> None:
        with torch.no_grad():
            for variable, array in zip(variables, arrays, strict=True):
                write(variable.value, array)

    def seed_generators(self, rank: int, seed: int) -> None:
        """Seed PyTorch's generators on all devices: Dropout without a seed draws from them."""
        torch.manual_seed(int(seed_state.mix(np.zeros(0), -1, rank, seed)[0]))

    def generators(self) -> list[Array]:
        """Return the states of PyTorch's generators: the CPU's, then each GPU's."""
        return [state.numpy() for state in (torch.get_rng_state(), *torch.cuda.get_rng_state_all())]

    def set_generators(self, states: list[Array]) -> None:
        """Set the states that ``generators`` returned."""
        cpu, *gpus = (torch.from_numpy(np.array(state)) for state in states)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus[: torch.cuda.device_count()])

    # Momentum.

    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step: ``v <- mu v + u``, ``x <- x + v``, continue from ``x + mu v``.

        The step started at ``x + mu v``. Its result x' is therefore the new x, and the new v is ``x' - x``. The new
        look-ahead point is ``x + (1 + mu) (x' - x)``. It is written into the memory of the old x; then the tensors are
        swapped. The first call, before any step, switches momentum on.
        """
        values = [v.value for v in self.trainable]
        self._momentum = momentum
        with torch.no_grad():
            if self._points is None:
                self._points = [value.clone() for value in values]
            elif values:
                torch._foreach_lerp_(self._points, values, 1 + momentum)
                for value, point in zip(values, self._points, strict=True):
                    # The optimizer and the module refer to the tensor objects, so their memory is exchanged and not the
                    # objects.
                    value.data, point.data = point.data, value.data

    def _x_values(self) -> list[Array]:
        return super()._x_values() if self._points is None else [read(point) for point in self._points]

    def set(self, vector: Array) -> None:
        """Set the trainable variables to a copy of the vector, and move the look-ahead point by the same difference."""
        values = [v.value for v in self.trainable]
        with torch.no_grad():
            offsets = torch._foreach_sub(values, self._points) if self._points else []
            super().set(vector)
            if self._points:
                torch._foreach_copy_(self._points, values)
                torch._foreach_add_(values, offsets)

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned, and reset the velocity to 0."""
        armed, self._points = self._points is not None, None
        super().restore(arrays)
        if armed:
            self.look_ahead(self._momentum)

    @contextmanager
    def _at_x(self) -> Iterator[None]:
        """Temporarily set the variables to x instead of the look-ahead point."""
        if not self._points:
            yield
            return
        values = [v.value for v in self.trainable]
        ahead = [value.clone() for value in values]
        torch._foreach_copy_(values, self._points)
        try:
            yield
        finally:
            torch._foreach_copy_(values, ahead)

    def _settle(self) -> None:
        if self._points:
            with torch.no_grad():
                torch._foreach_copy_([v.value for v in self.trainable], self._points)
        self._points = None
        self.model.eval()


class _Watch:
    """A recorder of the first use of any of several variables.

    While it is armed, the variables have a subclass of their class that overrides ``value`` and ``assign``. Every other
    use of a variable calls one of these.

    Args:
        variables: list of keras.Variable.

    Attributes:
        used: str, optional. The path of the variable that was used first; None if none was used.
    """

    def __init__(self, variables: list[Any]) -> None:
        self.used: str | None = None
        self._variables, self._armed = variables, False
        self._own = [type(variable) for variable in variables]
        kinds = {kind: self._noting(kind) for kind in set(self._own)}
        self._noted = [kinds[kind] for kind in self._own]

    def arm(self) -> None:
        """Start to record uses."""
        self.used, self._armed = None, True
        for variable, kind in zip(self._variables, self._noted, strict=True):
            object.__setattr__(variable, "__class__", kind)

    def disarm(self) -> None:
        """Stop recording uses."""
        if self._armed:
            self._armed = False
            for variable, kind in zip(self._variables, self._own, strict=True):
                object.__setattr__(variable, "__class__", kind)

    def _noting(self, kind: Any) -> type:
        watch = self

        def note(variable: keras.Variable) -> None:
            watch.used = watch.used or str(variable.path)

        def value(variable: keras.Variable) -> torch.Tensor:
            note(variable)
            return kind.value.fget(variable)

        def assign(variable: keras.Variable, value: torch.Tensor) -> torch.Tensor:
            note(variable)
            return kind.assign(variable, value)

        return type(kind.__name__, (kind,), {"value": property(value), "assign": assign, "__module__": kind.__module__})


class _Loss:
    """A context that extracts the loss of one batch from Keras' running mean, and restores the mean."""

    def __init__(self, metric: keras.metrics.Mean | None) -> None:
        self._state = [] if metric is None else [metric.total.value, metric.count.value]

    def __enter__(self) -> _Loss:
        with torch.no_grad():
            self._before = [tensor.clone() for tensor in self._state]
            for tensor in self._state:
                tensor.zero_()
        return self

    def sums(self) -> list[Any]:
        """Return total and count of the batch: copies of the metric's tensors, or zeros without a metric."""
        return [tensor.clone() for tensor in self._state] or [0.0, 0.0]

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for tensor, before in zip(self._state, self._before, strict=True):
                tensor.copy_(before)


def _sample(total: float, count: float) -> LossSample:
    return LossSample(total / count if count else UNUSED, count)


def copied(array: Array) -> torch.Tensor:
    """Return a tensor that holds a copy of an array. ``keras.ops.convert_to_tensor`` would copy a second time."""
    return shared(aligned_copy(array))


def shared(array: Array) -> torch.Tensor:
    """Return a tensor that uses the memory of an array."""
    try:
        return torch.from_numpy(array)
    except TypeError:  # PyTorch does not support the numpy dtype, such as bfloat16
        return keras.ops.convert_to_tensor(array)


def read(tensor: torch.Tensor) -> Array:
    """Return the tensor as a numpy array: a view of its memory if it is on the CPU and has no 16-bit float dtype.

    Tensors of float16 and bfloat16 are converted to float32.
    """
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    array: Array = tensor.cpu().numpy()
    return array


def write(tensor: torch.Tensor, array: Any) -> None:
    """Copy an array's values into the memory of a tensor."""
    if tensor.device.type == "cpu" and tensor.dtype is not torch.bfloat16:
        np.copyto(tensor.detach().numpy(), array, casting="unsafe")
    else:
        tensor.copy_(torch.from_numpy(np.array(array, np.float32 if tensor.is_floating_point() else None)))


@contextmanager
def eagerly() -> Iterator[None]:
    """Temporarily run functions of ``torch.compile`` eagerly; restore the states of random generators afterwards."""
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        yield


def weights_detector(model: keras.Model) -> Callable[[Any], bool]:
    """Return a predicate that is True for PyTorch objects that may give access to the model's weights."""
    memory = {variable.value.untyped_storage().data_ptr() for variable in model_variables(model)}

    def detect(candidate: object) -> bool:
        if isinstance(candidate, torch.Tensor):
            return candidate.layout is not torch.strided or candidate.untyped_storage().data_ptr() in memory
        return isinstance(candidate, (torch.nn.Module, torch.optim.Optimizer))

    return detect
