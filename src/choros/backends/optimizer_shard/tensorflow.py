"""A rank's share of the optimizer's update on TensorFlow.

A variable can use shared memory, and steps read it in place. But each assignment gives the variable other memory, of
this process: TensorFlow never writes to memory that it has not allocated. So the update runs on variables as long as
this rank's pieces, and the new values are copied to the shared memory. This saves memory and no time: a whole update
that XLA has compiled writes to the variables in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from choros.backends.optimizer_shard.layout import Field, Memory, Piece
from choros.backends.optimizer_shard.shard import OptimizerShard
from choros.backends.tensorflow import FEW, KINDS, LARGE, TensorFlowReplica, operation_names, read, scalar, shared
from choros.errors import InvalidInputError
from choros.types import Array

_ASSIGNING = ("Assign", "Resource")  # how the names of operations that assign a variable begin; a gather may move one
_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


class TensorFlowOptimizerShard(OptimizerShard):
    """One rank's share of the optimizer's update on TensorFlow; see ``OptimizerShard``.

    A layer may set a weight in a step without the optimizer, as ``SpectralNormalization`` does. The variable would then
    use other memory. The program of the step shows whether it can.
    """

    block = 1 << 20  # values: with fewer, the calls take longer; with more, the new values take more memory
    replica: TensorFlowReplica

    def __init__(self, replica: Any, rank: int, size: int, tries: bool = False) -> None:
        super().__init__(replica, rank, size, tries)
        original, copy = vars(self.original), vars(self.optimizer)
        numbers = {name: value for name, value in original.items() if isinstance(value, keras.Variable)}
        copy.update(numbers)
        self._counters_and_rates = [variable.value for variable in numbers.values()]
        self._shared: dict[int, _SharedVariable] = {}  # by the id of the variable, while attached
        self._examined_programs, self._can_assign = 0, False  # their number, and whether one can assign a weight
        shapes = [piece.shape for group in self.groups[:1] for piece in group]
        self._gradients = [shared(total.reshape(shape)) for total, shape in zip(self.sums, shapes, strict=True)]
        self._places: list[list[tuple[tf.Variable, Array, tf.Tensor]]] = []  # of each group: what it updates, and where
        self._compiled: Any = None  # ConcreteFunction, traced at the first call

    @staticmethod
    def on_host(replica: Any) -> bool:
        """Return whether the weights are in memory of this host; see ``OptimizerShard``."""
        return bool(replica._on_host)

    def watch(self) -> None:
        """Begin to observe whether a step sets weights. Variables that a callback has set return to shared memory."""
        for held in self._shared.values():
            if held.has_moved():
                np.copyto(held.view, read(held.variable))
                held.place()

    def sets_weights(self) -> bool:
        """Return whether a step can set weights without the optimizer, by its program; see ``can_assign``."""
        steps = (self.replica._differentiate, self.replica._differentiate_kept)
        traces = [trace for step in steps for trace in step.traces()]
        if len(traces) != self._examined_programs:
            weights = {id(variable.value.handle) for variable in self.replica.trainable}
            self._can_assign = any(can_assign(trace.graph, weights) for trace in traces)
            self._examined_programs = len(traces)
        # After KINDS programs ``tf.function`` makes more, which ``traces`` does not list.
        return self._can_assign or (any(len(step.traces()) == KINDS for step in steps) and self.has_moved())

    def has_moved(self) -> bool:
        """Return whether a weight or slot of this rank is no longer in the shared memory."""
        return any(held.has_moved() for held in self._shared.values())

    def _attach(self, memory: Memory) -> None:
        for field in self.layout.fields():
            views = field.views(memory)
            for variable in field.variables:
                if variable is not None:
                    view = views[id(variable)]
                    held = self._shared[id(variable)] = _SharedVariable(variable.value, view, shared(view))
                    held.place()
        self._places = [self._places_of(group, memory) for group in self.groups]

    def _places_of(self, group: list[Piece], memory: Memory) -> list[tuple[tf.Variable, Array, tf.Tensor]]:
        """Return the variables of the pieces, and the memory that they update for a group."""
        fields: list[tuple[list[Any], Field]] = [(self.variables, self.layout.weights)]
        fields += [(vars(self.optimizer)[name], field) for name, field in self.layout.slots.items()]
        places: list[tuple[tf.Variable, Array, tf.Tensor]] = []
        for variables, field in fields:
            for variable, piece in zip(variables, group, strict=True):
                view = piece.view(field, memory)
                if variable is not None and view is not None:
                    places.append((variable.value, view, shared(view)))
        return places

    def _update(self, divisor: float, sum_group: Callable[[list[Piece]], None]) -> None:
        scale = scalar(divisor, self.replica.dtype.name)
        saved = [_value(variable) for variable in self._counters_and_rates] if len(self.groups) > 1 else []
        for index, (pieces, places) in enumerate(zip(self.groups, self._places, strict=True)):
            sum_group(pieces)
            if index:  # each call changes the same variables, such as the step counter
                for variable, value in zip(self._counters_and_rates, saved, strict=True):
                    _place(variable, value)
            for variable, _, tensor in places:
                _place(variable, tensor)
            self._run(scale)
            for variable, view, _ in places:
                np.copyto(view, read(variable))

    def _run(self, scale: tf.Tensor) -> None:
        """Run the optimizer on the variables of the pieces."""
        if self._compiled is not None:
            self._compiled(self._gradients, scale)
            return
        pays = len(self.variables) <= FEW and self.replica.size >= LARGE
        try:
            self._trace_and_run(bool(self.replica.model.jit_compile or pays), scale)
        except tf.errors.OpError:  # XLA cannot compile this optimizer; no variable was updated
            self.close()
            self._trace_and_run(False, scale)

    def _trace_and_run(self, xla: bool, scale: tf.Tensor) -> None:
        self._compiled = self.replica._compiled(self._trace, xla).get_concrete_function(self._gradients, scale)
        self._compiled(self._gradients, scale)

    def _trace(self, gradients: list[tf.Tensor], divisor: tf.Tensor) -> None:
        pairs = zip(gradients, self.variables, strict=True)
        self.optimizer.apply([tf.cast(gradient / divisor, v.dtype) for gradient, v in pairs], self.variables)

    def write(self, variable: Any, array: Array) -> bool:
        """Set a variable that is in the shared memory; return False for any other variable."""
        held = self._shared.get(id(variable))
        if held is not None:
            np.copyto(held.view, np.asarray(array).reshape(held.view.shape), casting="unsafe")
            held.place()
        return held is not None

    def take_settings(self) -> None:
        """Do nothing: a traced update keeps the numbers that it was traced with, as in Keras."""

    def _detach(self) -> None:
        for held in self._shared.values():
            held.variable.assign(tf.constant(held.view))
        for variable, view, _ in self._places[0] if self._places else []:
            variable.assign(tf.zeros(view.shape, variable.dtype))  # it may use the shared memory
        self._shared, self._places = {}, []
        self.replica.idle_shard = self  # with its compiled update, for the next fit of an equal model

    def close(self) -> None:
        """Release the variables that the traced update has captured; see ``TensorFlowReplica.close``."""
        if self._compiled is not None:
            self._compiled.graph._function_captures = None
            self._compiled = None


@dataclass
class _SharedVariable:
    """A variable of the model or its optimizer, and its place in the shared memory.

    Attributes:
        variable: tf.Variable.
        view: array on the shared memory.
        tensor: tensor on the same memory.
    """

    variable: tf.Variable
    view: Array
    tensor: tf.Tensor

    def has_moved(self) -> bool:
        """Return whether an assignment has given the variable other memory."""
        return _address(read(self.variable)) != _address(self.view)

    def place(self) -> None:
        """Let the variable use the shared memory.

        Raises:
            InvalidInputError: TensorFlow does not let it.
        """
        _place(self.variable, self.tensor)
        if self.has_moved():
            # A gather from a variable whose memory is in use makes TensorFlow copy at every assignment from then on.
            raise InvalidInputError(
                f"Workers cannot share the weight {self.variable.name!r}: TensorFlow copies what is assigned to it, as "
                "after tf.gather on the tf.Variable. Give Trainer(shard_optimizer=False), or gather from the weight's "
                "value (keras.ops.take)."
            )


def can_assign(graph: tf.Graph, handles: set[int]) -> bool:
    """Return whether a traced step can assign a variable, or give it other memory.

    An assignment within a loop or a condition, or a function of Python, counts as an assignment to any variable.

    Args:
        graph: the graph of the trace.
        handles: ids of the handles of the variables.
    """
    names = {inside.name for outside, inside in graph.captures if id(outside) in handles}
    assigned = [op.inputs[0].name for op in graph.get_operations() if op.type.startswith(_ASSIGNING) and op.inputs]
    if names.intersection(assigned) or operation_names(graph).intersection(_PYTHON):
        return True
    return any(name.startswith(_ASSIGNING) for name in operation_names(graph, nested=True))


def _place(variable: tf.Variable, tensor: tf.Tensor) -> None:
    """Let a variable use the memory of a tensor: an assignment on the CPU takes the tensor itself."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tensor)


def _value(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
