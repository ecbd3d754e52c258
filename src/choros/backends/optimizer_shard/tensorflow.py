"""A rank's share of the optimizer's update on TensorFlow.

A variable can use shared memory, and steps read it in place. But each assignment gives the variable other memory, of
this process: TensorFlow never writes to memory that it has not allocated. So the update runs on variables as long as
this rank's pieces, and the new values are copied to the shared memory. This saves memory and no time: XLA updates the
variables of a whole update in place.
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
from choros.backends.tensorflow import FEW, KINDS, LARGE, TensorFlowReplica, read, scalar, shared
from choros.types import Array


class TensorFlowOptimizerShard(OptimizerShard):
    """One rank's share of the optimizer's update on TensorFlow; see ``OptimizerShard``.

    A layer may set a weight in a step without the optimizer, as ``SpectralNormalization`` does. The variable then has
    other memory. Only steps whose program can assign a weight are examined.
    """

    block = 1 << 20  # values: with fewer, the calls take longer; with more, the new values take more memory
    replica: TensorFlowReplica

    def __init__(self, replica: Any, rank: int, size: int) -> None:
        super().__init__(replica, rank, size)
        original, copy = vars(replica.model.optimizer), vars(self.optimizer)
        numbers = {name: value for name, value in original.items() if isinstance(value, keras.Variable)}
        copy.update(numbers)
        self._numbers = [variable.value for variable in numbers.values()]
        self._shared: dict[int, _SharedVariable] = {}  # by the id of the variable, while attached
        self._before: list[Array] = []
        self._examined, self._may_set = 0, False  # number of examined programs, and whether one may assign a weight
        shapes = [piece.shape for group in self.groups[:1] for piece in group]
        self._gradients = [shared(total.reshape(shape)) for total, shape in zip(self.sums, shapes, strict=True)]
        self._blocks: list[list[tuple[tf.Variable, Array, tf.Tensor]]] = []  # of each group: what it updates, and where
        self._compiled: tf.types.experimental.ConcreteFunction | None = None

    @staticmethod
    def on_host(replica: Any) -> bool:
        """Return whether the weights are in memory of this host; see ``OptimizerShard``."""
        return bool(replica._on_host)

    def watch(self) -> None:
        """Begin to observe whether a step sets weights. Variables that a callback has set return to shared memory."""
        if not self._shared:
            # An assignment to a variable whose memory is in use gives it other memory.
            self._before = self.replica._values(self.replica.trainable)
            return
        for variable in self._shared.values():
            if variable.has_moved():
                np.copyto(variable.view, read(variable.variable))
                variable.place()

    def sets_weights(self, *, thorough: bool = False) -> bool:
        """Return whether a step has set weights without the optimizer."""
        trainable = self.replica.trainable
        if self._shared:
            return (thorough or self._may_assign()) and any(self._shared[id(variable)].has_moved() for variable in trainable)
        before, self._before = self._before, []
        pairs = zip(trainable, before, strict=False)  # without a step in between there is nothing to compare
        return any(_address(read(variable.value)) != _address(old) for variable, old in pairs)

    def _may_assign(self) -> bool:
        """Return whether the program of a step may assign a weight."""
        steps = (self.replica._differentiate, self.replica._differentiate_kept)
        traces = [trace for step in steps for trace in step.traces()]
        if len(traces) != self._examined:
            weights = {id(variable.value.handle) for variable in self.replica.trainable}
            self._may_set = any(may_assign(trace.graph, weights) for trace in traces)
            self._examined = len(traces)
        return self._may_set or any(len(step.traces()) == KINDS for step in steps)  # later programs are not listed

    def _attach(self, memory: Memory) -> None:
        for field in self.layout.fields():
            views = field.views(memory)
            for variable in field.variables:
                if variable is not None:
                    self._shared[id(variable)] = _SharedVariable(variable.value, view := views[id(variable)], shared(view))
                    self._shared[id(variable)].place()
        self._blocks = [self._block(group, memory) for group in self.groups]

    def _block(self, group: list[Piece], memory: Memory) -> list[tuple[tf.Variable, Array, tf.Tensor]]:
        """Return the variables of the pieces, and the memory that they update for a group."""
        fields: list[tuple[list[Any], Field]] = [(self.variables, self.layout.weights)]
        fields += [(vars(self.optimizer)[name], field) for name, field in self.layout.slots.items()]
        block: list[tuple[tf.Variable, Array, tf.Tensor]] = []
        for variables, field in fields:
            for variable, piece in zip(variables, group, strict=True):
                view = piece.view(field, memory)
                if variable is not None and view is not None:
                    block.append((variable.value, view, shared(view)))
        return block

    def _update(self, divisor: float, sum_group: Callable[[list[Piece]], None]) -> None:
        scale = scalar(divisor, self.replica.dtype.name)
        numbers = [_value(variable) for variable in self._numbers] if len(self.groups) > 1 else []
        for index, (pieces, block) in enumerate(zip(self.groups, self._blocks, strict=True)):
            sum_group(pieces)
            if index:  # every call changes the same numbers, such as the step counter
                for number, value in zip(self._numbers, numbers, strict=True):
                    _place(number, value)
            for variable, _, tensor in block:
                _place(variable, tensor)
            self._run(scale)
            for variable, view, _ in block:
                np.copyto(view, read(variable))

    def _run(self, scale: tf.Tensor) -> None:
        """Run the optimizer on the variables of the pieces."""
        if self._compiled is not None:
            self._compiled(self._gradients, scale)
            return
        pays = len(self.variables) <= FEW and self.replica.size >= LARGE
        try:
            compiled = self._traced(bool(self.replica.model.jit_compile or pays), scale)
            compiled(self._gradients, scale)
        except tf.errors.OpError:  # XLA cannot compile this optimizer; no variable was updated
            compiled = self._traced(False, scale)
            compiled(self._gradients, scale)
        self._compiled = compiled

    def _traced(self, xla: bool, scale: tf.Tensor) -> Any:
        return self.replica._compiled(self._trace, xla).get_concrete_function(self._gradients, scale)

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
            held.variable.assign(tf.constant(read(held.variable)))
        for variable, view, _ in self._blocks[0] if self._blocks else []:
            variable.assign(tf.zeros(view.shape, variable.dtype))  # it may use the shared memory
        self._shared, self._blocks = {}, []
        self.replica.idle_shard = self  # with its compiled update, for the next fit of an equal model

    def close(self) -> None:
        """Release the variables that the traced update has captured."""
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
        """Let the variable use the shared memory."""
        _place(self.variable, self.tensor)


def may_assign(graph: tf.Graph, handles: set[int]) -> bool:
    """Return whether a traced step may assign a variable.

    An assignment within a loop or a condition counts as one to any variable.

    Args:
        graph: the graph of the trace.
        handles: ids of the handles of the variables.
    """
    names = {inside.op.name for outside, inside in graph.captures if id(outside) in handles}
    definition = graph.as_graph_def()
    nested = [node for function in definition.library.function for node in function.node_def]
    assigned = [node.input[0].split(":")[0] for node in definition.node if _assigns(node.op)]
    return bool(names.intersection(assigned)) or any(_assigns(node.op) for node in nested)


def _assigns(operation: str) -> bool:
    return operation.startswith(("Assign", "Resource")) and operation != "ResourceGather"


def _place(variable: tf.Variable, tensor: tf.Tensor) -> None:
    """Let a variable use the memory of a tensor: an assignment on the CPU takes the tensor itself."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tensor)


def _value(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
