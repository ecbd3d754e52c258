"""Steps of a Keras model on PyTorch, recorded as tensor operations.

Keras runs the Python code of all layers in each step, and PyTorch builds the graph of the backward pass each time. For
a small model this takes longer than the operations. A record is made once for each form of a batch: ``make_fx`` of
PyTorch runs the step on tensors without data, and lists the operations of the forward pass, the backward pass and the
update. The record then runs without that code. It calls the same operations on the same memory in the same order, so
results are the same to the bit. With ``jit_compile=True`` the record is compiled.

A step is recorded only if it is Keras' own code (``choros.backends.model_watch``) and if nothing in it depends on the
value of a tensor, such as a loss scale. All other steps run as before.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from choros.backends.model_watch import ModelWatch

logger = logging.getLogger(__name__)

_SECONDS = 1.0  # the steps of a form of batch take so long in all before the form is recorded
_MAX_SECONDS = 2.0  # processor seconds of a recording; after these it ends without a record, unless it is compiled
_MAX_CALLS = 6000  # and after so many calls of PyTorch, if it is compiled
_COMPILE_AFTER = 16  # with ``jit_compile``: number of steps of a further form of batch before it is compiled
_MAX_FORMS = 8  # largest number of forms of batches that are recorded
_MAX_CHANGES = 8  # after so many changes that came soon after a record, steps are not recorded any more
_SOON = 100  # number of steps; a record that ran more often was worth its time
_TRIALS = 5  # first runs of a record whose time is compared with that of the steps before it
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

Step = Callable[..., list[Any]]
_Form = tuple[Any, ...]


class NotRecordableError(Exception):
    """A step that cannot be recorded. It does not leave this package and the replica."""


class RecordedStep:
    """A step that is recorded after some calls.

    Args:
        step: callable. It takes the tensors of a batch, in the structure of ``fit``, and returns a flat list of
            tensors, and of constants: numbers, names, None. It changes state only in the variables.
        variables: list of keras.Variable. All variables that the step may use.
        watch: the watch over the model, which several steps may share.
        compiled: bool. Whether records are compiled, the first one at the first call.

    Attributes:
        made: bool. Whether there has been a record.
    """

    def __init__(self, step: Step, variables: list[Any], watch: ModelWatch, compiled: bool) -> None:
        self._step, self._watch, self._compiled = step, watch, compiled
        self._variables = list({id(variable): variable for variable in variables}.values())
        self._records: dict[_Form, _Record | None] = {}  # None: the record took longer than the step
        self._steps: dict[_Form, tuple[int, float]] = {}  # number and seconds of the steps without a record
        self._changes = watch.changes
        self._runs = self._wasted = 0
        self._key: _Form | None = None  # form and constants of the last call, if its step is to be counted
        self._active = True
        self.made = False

    def run(self, data: Any, *constants: Any) -> list[Any] | None:
        """Run the record of a step, if there is one.

        Args:
            data: the batch as the step takes it.
            *constants: further arguments of the step. A record holds for equal constants.

        Returns:
            The list that the step returns. None: the caller has to run the step, in ``counted``.
        """
        self._key = None
        if not self._active or _special_mode():
            return None
        leaves: list[Any] = []
        form = _form(data, leaves)
        if form is None or len(set(map(id, leaves))) < len(leaves):  # a record has an argument for each tensor
            return None
        key = (form, constants, _compiler_settings()) if self._compiled else (form, constants)
        if self._records:
            self._see_changes()
        if key not in self._records:
            if not self._due(key):
                self._key = key
                return None
            if not self._make(key, data, constants):
                return None
        record = self._records[key]
        if record is None:
            return None
        if self._compiled and record.forms != _forms(self._variables):  # as after ``model.half()``
            self._drop()
            return None
        self._runs += 1
        if record.trials:
            return self._try(key, record, leaves)
        return record(self._variables, leaves)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the step that the caller runs in this context after ``run`` has returned None."""
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        if self._key is not None and (self._key in self._steps or len(self._steps) < 8 * _MAX_FORMS):
            number, total = self._steps.get(self._key, (0, 0.0))
            self._steps[self._key] = number + 1, total + seconds

    def _due(self, key: _Form) -> bool:
        if len(self._records) >= _MAX_FORMS or threading.current_thread() is not threading.main_thread():
            return False
        number, seconds = self._steps.get(key, (0, 0.0))
        if self._compiled:  # by number: a compiled step rounds in another way, and a run with a seed is repeatable
            return not self._records or number >= _COMPILE_AFTER
        return seconds > _SECONDS

    def _make(self, key: _Form, data: Any, constants: _Form) -> bool:
        """Record the step; return whether there is a record. After a failure, no further form is recorded."""
        self._watch.changed()
        self._see_changes()
        record = None if self._watch.foreign else _record(self._step, self._variables, data, constants, self._compiled)
        if record is None:
            self._active = bool(self._records)
            self._records[key] = None
            return False
        self._records[key] = record
        self.made = True
        record.trials = 0 if self._compiled or key not in self._steps else _TRIALS
        return True

    def _try(self, key: _Form, record: _Record, leaves: list[Any]) -> list[Any]:
        """Run a new record and measure it. A record of very many small operations may take longer than the step."""
        begun = time.perf_counter()
        results = record(self._variables, leaves)
        record.shortest = min(record.shortest, time.perf_counter() - begun)
        record.trials -= 1
        number, seconds = self._steps[key]
        if not record.trials and record.shortest > seconds / number:
            self._records[key] = None
        return results

    def _see_changes(self) -> None:
        """Drop the records if an attribute of the model has changed."""
        self._watch.changed()
        if self._watch.changes == self._changes:
            return
        self._changes = self._watch.changes
        self._drop()

    def _drop(self) -> None:
        """Drop the records. After several drops that came soon after a record, steps are not recorded any more."""
        if self._records:
            self._wasted += self._runs < _SOON
            self._active = self._wasted < _MAX_CHANGES and not self._watch.foreign
        self._records, self._steps, self._runs = {}, {}, 0


def _compiler_settings() -> tuple[Any, ...]:
    """Return the settings of PyTorch that a program is compiled for."""
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


def _forms(variables: list[Any]) -> list[_Form]:
    """Return dtypes and strides of variables. ``model.half()`` changes them within the same tensors."""
    return [(variable._value.dtype, variable._value.stride()) for variable in variables]


def _special_mode() -> bool:
    """Return whether PyTorch runs operations in a way that a record does not have."""
    hooked = bool(torch.nn.modules.module._has_any_global_hook())
    return torch.is_autocast_enabled("cpu") or torch.is_anomaly_enabled() or hooked


def _form(part: Any, leaves: list[Any]) -> _Form | None:
    """Return structure, shapes and dtypes of a batch and append its tensors; None if a leaf is of another kind."""
    if isinstance(part, torch.Tensor):
        if part.layout is not torch.strided or part.device.type != "cpu":
            return None
        leaves.append(part)
        return part.shape, part.stride(), part.dtype
    if part is None:
        return ()
    if isinstance(part, dict):
        items = [(key, _form(value, leaves)) for key, value in part.items()]
        return None if any(form is None for _, form in items) else ("dict", *items)
    if type(part) in (tuple, list):
        forms = [_form(value, leaves) for value in part]
        return None if any(form is None for form in forms) else (type(part).__name__, *forms)
    return None


def _filled(part: Any, leaves: Any) -> Any:
    """Return the batch with other tensors, taken from an iterator."""
    if isinstance(part, torch.Tensor):
        return next(leaves)
    if isinstance(part, dict):
        return {key: _filled(value, leaves) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        return type(part)([_filled(value, leaves) for value in part])
    return part


_TENSOR = object()  # stands for a tensor among the results of a step


class _Record:
    """The recorded operations of a step.

    Args:
        operations: callable. It takes the variables' tensors and those of the batch.
        results: list. What the step returned: constants, and ``_TENSOR`` for each tensor.

    Attributes:
        forms: list. ``_forms`` of the variables at the recording. A compiled program does not check them.
        trials: int. Number of runs that are still to be measured.
        shortest: float. Seconds of the fastest of these.
    """

    def __init__(self, operations: Callable[..., Any], results: list[Any], forms: list[_Form]) -> None:
        self._operations, self._results, self.forms = operations, results, forms
        self.trials, self.shortest = 0, float("inf")

    def __call__(self, variables: list[Any], leaves: list[Any]) -> list[Any]:
        values = [variable._value for variable in variables]
        with torch.no_grad():
            tensors = iter(self._operations(values, leaves))
        return [next(tensors) if result is _TENSOR else result for result in self._results]


def _record(step: Step, variables: list[Any], data: Any, constants: _Form, compiled: bool) -> _Record | None:
    """Record a step; return None if it cannot be recorded. The variables keep their values.

    During the recording they refer to tensors without data, so no other thread may read them. With a record, the
    gradients that the last step left in the parameters are deleted.
    """
    results: list[Any] = []
    values = [variable._value for variable in variables]
    if any(value.device.type != "cpu" or value.layout is not torch.strided for value in values):
        return None

    def run(arguments: list[Any], leaves: list[Any]) -> list[Any]:
        inputs = []
        for value, argument in zip(values, arguments, strict=True):
            inputs.append(argument.detach().requires_grad_(value.requires_grad))
        for variable, tensor in zip(variables, inputs, strict=True):
            variable._value = tensor
        try:
            with torch.enable_grad(), _Limit(compiled):
                outputs = step(_filled(data, iter(leaves)), *constants)
            if any(variable._value is not tensor for variable, tensor in zip(variables, inputs, strict=True)):
                raise NotRecordableError
        finally:
            for variable, value in zip(variables, values, strict=True):
                variable._value = value
        results[:] = [_TENSOR if isinstance(output, torch.Tensor) else output for output in outputs]
        return [output.detach() for output in outputs if isinstance(output, torch.Tensor)]

    leaves: list[Any] = []
    _form(data, leaves)
    gradients = [value.grad for value in values]
    with _signals_held(), torch.no_grad():  # outside of ``try``: an error of a handler must reach the caller
        try:
            module = make_fx(run, tracing_mode="fake")(values, leaves)
        except (NotRecordableError, *_ERRORS):  # the step depends on values, or fake tensors lack an operation
            for value, gradient in zip(values, gradients, strict=True):  # the step has cleared them
                value.grad = gradient
            return None
    _simplify(module)
    operations = _compile(module, values, leaves) if compiled else module.forward
    return _Record(operations, results, _forms(variables))


def _compile(module: torch.fx.GraphModule, variables: list[Any], leaves: list[Any]) -> Callable[..., Any]:
    """Compile the operations of a step as one program.

    ``torch.compile`` would add a check of all arguments to each call, 0.1 to 0.3 ms, and takes 2 to 4 s to analyze the
    module even if the program is in PyTorch's cache. A record needs neither: its arguments have one form.
    """
    module.graph.set_codegen(CodeGen())  # the arguments as one list
    module = torch.fx.GraphModule(module, module.graph)
    for node in module.graph.nodes:
        node.meta.pop("unbacked_bindings", None)  # symbols of the recording; the compilation makes others
    inputs = [tensor.detach() for tensor in (*variables, *leaves)]
    try:
        from torch._inductor import standalone_compile  # takes 2 s

        with torch.no_grad():
            program = standalone_compile(module, inputs, dynamic_shapes="from_example_inputs")
    except (ImportError, *_ERRORS) as error:  # no public interface: a version lacks it, or it refuses an operation
        logger.info("PyTorch's compiler refused a recorded step, so torch.compile compiles it: %s", error)
        program = torch.compile(module, fullgraph=True)
    return lambda values, batch: program(*values, *batch)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Call the handlers of signals that arrive within the context at its end.

    A handler may raise, as that of Ctrl-C does. An exception within an operation on tensors without data may pass
    through C++ code that ends the process.
    """
    arrived: list[int] = []
    current = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in current.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for held in arrived:
            signal.raise_signal(held)


class _Limit(TorchFunctionMode):  # type: ignore[misc]  # PyTorch gives it no type
    """A context that ends the recording of a step with very many operations, such as one of a long recurrent loop.

    The error is raised where Python calls PyTorch. Raised within an operation (``TorchDispatchMode``), it could pass
    through C++ code that ends the process. So the backward pass, about as long as the forward pass, has no limit.
    """

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self._compiled, self._count, self._end = compiled, 0, time.thread_time() + _MAX_SECONDS

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if self._count > _MAX_CALLS if self._compiled else time.thread_time() > self._end:
            raise NotRecordableError
        return function(*args, **(kwargs or {}))


def _simplify(module: torch.fx.GraphModule) -> None:
    """Remove operations without an effect: without gradients, ``detach`` returns its input."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def forget_losses(model: keras.Model) -> None:
    """Remove the terms of the loss that layers keep from a recorded step: they are tensors without data."""
    model._clear_losses()
