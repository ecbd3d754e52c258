"""Fused update: traces a rule's three functions into one list of numpy calls that allocate no memory.

An elementwise rule is arithmetic on whole vectors. One call with stand-ins for the vectors records the arithmetic. The
program computes a repeated expression once and writes results directly to their destination. Other values use a few
blocks of scratch memory that stay in the core's cache. The results are bit-equal to those of the rule itself.

A rule with more than ``+ - * / **`` and plain numbers cannot be traced. It is then called as it is, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import numpy as np

from choros.param_server.merge_rule import MergeRule
from choros.types import Array

LOCAL, SEEN, CENTER, MEMORY = range(4)
# numpy's ``**`` calls these functions for these powers.
_POWER_FUNCTIONS: Final = {2.0: np.square, 0.5: np.sqrt, -1.0: np.reciprocal}


class _Tape:
    """Recorded operations of a rule, each operation once, in the order of the calls."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], _Vector] = {}
        self.constants: list[_Vector] = []
        self.ops: list[_Vector] = []

    def constant(self, value: Any) -> _Vector:
        # ``bool`` and numpy scalars are refused too: with them the dtype of the rule's own result could be another.
        if type(value) not in (int, float):
            raise TypeError(f"a vector meets {type(value).__name__}")
        key = (float(value),)
        if key not in self.values:
            self.values[key] = _Vector(self, value=float(value))
            self.constants.append(self.values[key])
        return self.values[key]

    def apply(self, function: Any, *operands: Any) -> _Vector:
        # x * 1 and x / 1 are x, bit for bit.
        if function in (np.multiply, np.true_divide) and type(operands[1]) in (int, float) and operands[1] == 1:
            return operands[0]  # type: ignore[no-any-return]
        if function is np.multiply and type(operands[0]) in (int, float) and operands[0] == 1:
            return operands[1]  # type: ignore[no-any-return]
        sources = tuple(v if isinstance(v, _Vector) else self.constant(v) for v in operands)
        # By identity: ``_Vector`` has no equality. The objects live in ``values``, so no ID is reused.
        key = (function, *map(id, sources))
        if key not in self.values:
            self.values[key] = _Vector(self, function, sources)
            self.ops.append(self.values[key])
        return self.values[key]


def _binary(function: object) -> Callable[[_Vector, Any], _Vector]:
    return lambda self, other: self.tape.apply(function, self, other)


def _reflected(function: object) -> Callable[[_Vector, Any], _Vector]:
    return lambda self, other: self.tape.apply(function, other, self)


class _Vector:
    """Stand-in for a vector during a trace. numpy's functions and comparisons refuse it."""

    # numpy then returns NotImplemented for ``array + vector``, so the trace fails in ``__radd__`` instead of making an
    # array of objects.
    __array_ufunc__ = None

    def __init__(
        self, tape: _Tape, function: object = None, sources: tuple[_Vector, ...] = (), value: float = 0.0
    ) -> None:
        self.tape, self.function, self.sources, self.value = tape, function, sources, value

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("the rule's operations depend on a vector's values")

    __add__, __radd__ = _binary(np.add), _reflected(np.add)
    __sub__, __rsub__ = _binary(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _binary(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _reflected(np.true_divide)
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __neg__(self) -> _Vector:
        return self.tape.apply(np.negative, self)

    def __pow__(self, power: object) -> _Vector:
        # The same function as numpy's own ``**``: ``np.power(x, 0.5)`` may differ from ``np.sqrt(x)`` in the last bit.
        if (type(power) is int or type(power) is float) and power in _POWER_FUNCTIONS:
            return self.tape.apply(_POWER_FUNCTIONS[power], self)
        return self.tape.apply(np.power, self, power)


class Program:
    """Steps of one exchange on a block. A step is a numpy function and indices into a list of arrays.

    The list: local, seen, center, the memory, the spare center, the spare memory, constants, scratch.

    Attributes:
        reads_seen: bool. Whether the rule reads the center that the worker last saw.
        changed: list of int. Indices of the memory vectors that the program writes.
    """

    def __init__(self, tape: _Tape, inputs: list[_Vector], new: _Vector, new_memory: list[_Vector]) -> None:
        self._tape, self._inputs, self._new, self._new_memory = tape, inputs, new, new_memory
        self.changed = [i for i, vector in enumerate(new_memory) if vector is not inputs[MEMORY + i]]
        self.reads_seen = False
        self._steps: list[tuple[Any, ...]] = []
        self._spare = len(inputs)
        self._first_constant = 2 * len(inputs) - MEMORY + 1  # after inputs, spare center and spare memory
        self._scratch = 0

    def schedule(self, adopted: _Vector, shown: _Vector, keep_seen: bool | None) -> Self:
        """Assign an index of the list to every result; ``keep_seen=None`` writes seen only if the rule reads it."""
        new, new_memory, spare = self._new, self._new_memory, self._spare
        memory_targets = [(new_memory[i], spare + 1 + i) for i in self.changed]
        ops = _needed(self._tape.ops, [new, adopted, shown, *(vector for vector, _ in memory_targets)])
        vectors_read = [
            new,
            adopted,
            *(vector for vector, _ in memory_targets),
            *(source for op in ops for source in op.sources),
        ]
        self.reads_seen = any(vector is self._inputs[SEEN] for vector in vectors_read)
        places = {vector: i for i, vector in enumerate(self._inputs)}
        places |= {vector: self._first_constant + i for i, vector in enumerate(self._tape.constants)}
        targets = {**dict(memory_targets), new: spare}
        if ops and adopted is ops[-1] and adopted not in targets and self._inputs[LOCAL] not in targets:
            targets[adopted] = LOCAL  # the last operation: no later step reads local, so it may be overwritten
        last_use = {source: index for index, op in enumerate(ops) for source in op.sources}
        first_scratch = self._first_constant + len(self._tape.constants)
        free_scratch: list[int] = []
        for index, op in enumerate(ops):
            sources = [places[source] for source in op.sources]
            # A source that is used for the last time frees its scratch block before the result gets one: an elementwise
            # function may write to its own input.
            finished = {
                s for s in op.sources if last_use[s] == index and places[s] >= first_scratch and s is not adopted
            }
            free_scratch += [places[source] for source in finished]
            if op in targets:
                places[op] = targets[op]
            elif free_scratch:
                places[op] = free_scratch.pop()
            else:
                places[op] = first_scratch + self._scratch
                self._scratch += 1
            self._steps.append((op.function, *sources, places[op]))
        # The order matters: a result that is ``local`` itself is copied to its spare first, and later moves read it
        # there, because the move to LOCAL overwrites ``local``.
        moves = [(new, spare), *memory_targets, (adopted, LOCAL)]
        if keep_seen or (keep_seen is None and self.reads_seen):
            moves.append((shown, SEEN))
        for vector, target in moves:
            if places[vector] != target:
                self._steps.append((np.copyto, target, places[vector]))
                places[vector] = target if target >= spare else places[vector]
        return self

    def run(self, inputs: list[Array], spares: list[Array], blocks: list[slice], scratch: list[Array]) -> None:
        """Run all steps over one block after another.

        Args:
            inputs: local, seen, center and the memory vectors.
            spares: destinations of the new center and the new memory vectors.
            blocks: slices of the vectors, none longer than a block of scratch.
            scratch: blocks that the caller keeps for the next exchange; the list grows as needed.
        """
        dtype, size = inputs[CENTER].dtype, max((block.stop - block.start for block in blocks), default=0)
        # As arrays of the center's type: float32 times a Python float is float32 as in the rule, without a conversion
        # per block.
        constants = [np.asarray(constant.value, dtype) for constant in self._tape.constants]
        scratch += [np.empty(size, dtype) for _ in range(self._scratch - len(scratch))]
        used_scratch = scratch[: self._scratch]
        for block in blocks:
            length = block.stop - block.start
            values = (
                [vector[block] for vector in (*inputs, *spares)]
                + constants
                + [scratch_block[:length] for scratch_block in used_scratch]
            )
            for function, *places in self._steps:
                function(*[values[i] for i in places])


def _needed(ops: list[_Vector], outputs: list[_Vector]) -> list[_Vector]:
    """Return the operations on which the outputs depend, in their order."""
    needed: set[_Vector] = set()
    while outputs:
        vector = outputs.pop()
        if vector not in needed:
            needed.add(vector)
            outputs.extend(vector.sources)
    return [op for op in ops if op in needed]


def trace_rule(rule: MergeRule, window: int, info: Any, memories: int) -> Program | None:
    """Trace a rule: call its three functions once with stand-ins.

    Args:
        rule: MergeRule. An elementwise rule.
        window: int. Argument of ``propose``.
        info: ExchangeInfo. Argument of ``merge``.
        memories: int. Number of memory vectors.

    Returns:
        Program, or None if the rule cannot be traced or raises. The caller then calls the rule with vectors, so an
        error of the rule appears there.

    Example:
        >>> class Elastic:
        ...     shows, elementwise = "before", True
        ...     def propose(self, local, seen, window): return local
        ...     def merge(self, center, message, info, memory): return center + 0.5 * (message - center), memory
        ...     def adopt(self, local, shown): return local - 0.5 * (local - shown)
        >>> program = trace_rule(Elastic(), 1, None, 0)
        >>> local, center, spare = np.full(3, 4.0), np.zeros(3), np.empty(3)
        >>> program.run([local, center, center], [spare], [slice(0, 3)], [])
        >>> local.tolist(), spare.tolist(), program.reads_seen
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], False)
    """
    tape = _Tape()
    inputs = [_Vector(tape) for _ in range(MEMORY + memories)]
    try:
        message = rule.propose(inputs[LOCAL], inputs[SEEN], window)
        new, new_memory = rule.merge(inputs[CENTER], message, info, tuple(inputs[MEMORY:]))
        shown = inputs[CENTER] if rule.shows == "before" else new
        adopted = rule.adopt(inputs[LOCAL], shown)
    # Any exception: the rule is the user's, and its error appears again, with real vectors, in the caller.
    except Exception:
        return None
    results = [new, adopted, *new_memory]
    if len(results) != 2 + memories or not all(isinstance(vector, _Vector) for vector in results):
        return None
    return Program(tape, inputs, new, list(new_memory)).schedule(adopted, shown, getattr(rule, "uses_seen", None))
