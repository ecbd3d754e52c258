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

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from choros.backends.model_watch import ModelWatch

_SECONDS = 0.5  # a form of batch is recorded when its steps have taken so long; a record takes about as long
_MANY = 16  # with ``jit_compile``: a second form of batch is compiled at its 16th step
_FORMS = 8  # most forms of batches that are recorded
_CHANGES = 8  # after so many changes of the model's attributes, its steps are not recorded any more
_OPERATIONS = 1000  # most operations of a record: more take as long by themselves as with Keras' code around them
_CALLS = 5000  # most calls of PyTorch while a step is recorded, of which many are no operations of the record

Step = Callable[..., list[Any]]
_Form = tuple[Any, ...]


class RecordedStep:
    """A step that is recorded after some calls.

    Args:
        step: callable. It takes the tensors of a batch, in the structure of ``fit``, and returns a flat list of
            tensors, numbers and None. It changes state only in the variables.
        variables: list of keras.Variable. All variables that the step may use.
        watch: the watch over the model, which several steps may share.
        compiled: bool. Whether the record is compiled, at the first call.
    """

    def __init__(self, step: Step, variables: list[Any], watch: ModelWatch, compiled: bool) -> None:
        self._step, self._watch, self._compiled = step, watch, compiled
        self._variables = list({id(variable): variable for variable in variables}.values())
        self._records: dict[_Form, _Record | None] = {}
        self._spent: dict[_Form, float] = {}
        self._changes = watch.changes
        self._key: _Form | None = None  # the form of the last batch, if its steps are counted
        self.active = not watch.foreign

    def run(self, data: Any, *constants: Any) -> list[Any] | None:
        """Run the record of a step, if there is one.

        Args:
            data: the batch as the step takes it.
            *constants: further arguments of the step, part of the batch's form.

        Returns:
            The list that the step returns. None: the caller has to run the step, and may pass its seconds to ``count``.
        """
        self._key = None
        if not self.active:
            return None
        self._watch.changed()
        if self._watch.changes != self._changes:
            self._forget()
            if not self.active:
                return None
        leaves: list[Any] = []
        form = _form(data, leaves)
        if form is None:
            return None
        key = (form, constants)
        if key not in self._records:
            if not self._due(key):
                self._key = key
                return None
            self._records[key] = _record(self._step, self._variables, data, constants, self._compiled)
        record = self._records[key]
        return None if record is None else record(self._variables, leaves)

    def count(self, seconds: float) -> None:
        """Add the duration of the step that the caller ran after ``run`` had returned None."""
        if self._key is not None:
            self._spent[self._key] = self._spent.get(self._key, 0.0) + (1.0 if self._compiled else seconds)

    def _due(self, key: _Form) -> bool:
        if len(self._records) >= _FORMS:
            return False
        if self._compiled:  # by number: a compiled step rounds in another way, and a run with a seed is repeatable
            return not self._records or self._spent.get(key, 0.0) >= _MANY
        return self._spent.get(key, 0.0) > _SECONDS

    def _forget(self) -> None:
        """Drop the records, because an attribute of the model has changed."""
        self._changes = self._watch.changes
        self._records, self._spent = {}, {}
        self.active = self._changes <= _CHANGES


def _form(part: Any, leaves: list[Any]) -> _Form | None:
    """Return structure, shapes and dtypes of a batch and append its tensors; None if it has other leaves."""
    if isinstance(part, torch.Tensor):
        leaves.append(part)
        return part.shape, part.dtype
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


class _Record:
    """The recorded operations of a step.

    Args:
        operations: callable. It takes the variables' tensors and those of the batch.
        results: list. What the step returned: numbers and None, and ``_TENSOR`` for each tensor.
    """

    def __init__(self, operations: Callable[..., Any], results: list[Any]) -> None:
        self._operations, self._results = operations, results

    def __call__(self, variables: list[Any], leaves: list[Any]) -> list[Any]:
        values = [variable._value for variable in variables]
        with torch.no_grad():
            tensors = iter(self._operations(values, leaves))
        return [next(tensors) if result is _TENSOR else result for result in self._results]


_TENSOR = object()


def _record(step: Step, variables: list[Any], data: Any, constants: _Form, compiled: bool) -> _Record | None:
    """Record a step; return None if it cannot be recorded. No value changes."""
    results: list[Any] = []
    values = [variable._value for variable in variables]
    if any(_unsuitable(value) for value in values):
        return None

    def run(arguments: list[Any], leaves: list[Any]) -> list[Any]:
        inputs = []
        for value, argument in zip(values, arguments, strict=True):
            inputs.append(argument.detach().requires_grad_(value.requires_grad))
        for variable, tensor in zip(variables, inputs, strict=True):
            variable._value = tensor
        try:
            with torch.enable_grad(), _Limit():
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
    try:
        with torch.no_grad():
            module = make_fx(run, tracing_mode="fake")(values, leaves)
    except Exception:
        module = None
    if module is not None:
        _simplify(module)
    if module is None or len(module.graph.nodes) > _OPERATIONS:
        for value, gradient in zip(values, gradients, strict=True):  # the step has cleared them
            value.grad = gradient
        return None
    if compiled:
        return _Record(torch.compile(module, fullgraph=True), results)
    return _Record(module.forward, results)


class NotRecordableError(Exception):
    """A step that cannot be recorded."""


class _Limit(TorchDispatchMode):  # type: ignore[misc]  # PyTorch gives it no type
    """A context that ends the recording of a step with too many operations, such as one of a long recurrent loop."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if self._count > _CALLS:
            raise NotRecordableError
        return function(*args, **(kwargs or {}))


def _unsuitable(value: torch.Tensor) -> bool:
    """Return whether a variable's tensor is not on the CPU, not dense, or has a hook."""
    return value.device.type != "cpu" or value.layout is not torch.strided or bool(value._backward_hooks)


def _simplify(module: torch.fx.GraphModule) -> None:
    """Remove operations without an effect: without gradients, ``detach`` returns its input."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
