"""A rule's three functions as one short list of numpy calls that allocate nothing.

Elementwise rules are arithmetic on whole vectors. Called once with stand-ins for the vectors, they leave a record
of the arithmetic that they would do. What they compute twice is computed once, results are written straight to
where they belong, and the rest lives in a few blocks of scratch that stay in the core's cache. The values are the
same to the last bit. A rule that does more than ``+ - * / **`` with plain numbers is not followed: it is called as
it is, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import numpy as np

from choros.comm.group import Rule
from choros.types import Array

LOCAL, SEEN, CENTRE, MEMORY = range(4)
_SHORT: Final = {2.0: np.square, 0.5: np.sqrt, -1.0: np.reciprocal}  # what numpy's own ``**`` calls for these


class _Tape:
    """The operations of a rule, each one once, in the order in which it asked for them."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], _Vector] = {}
        self.constants: list[_Vector] = []
        self.ops: list[_Vector] = []

    def constant(self, value: Any) -> _Vector:
        if type(value) not in (int, float):
            raise TypeError(f"a vector meets {type(value).__name__}")
        key = (float(value),)
        if key not in self.known:
            self.known[key] = _Vector(self, value=float(value))
            self.constants.append(self.known[key])
        return self.known[key]

    def apply(self, function: Any, *given: Any) -> _Vector:
        if function in (np.multiply, np.true_divide) and type(given[1]) in (int, float) and given[1] == 1:
            return given[0]  # type: ignore[no-any-return]
        if function is np.multiply and type(given[0]) in (int, float) and given[0] == 1:
            return given[1]  # type: ignore[no-any-return]
        sources = tuple(v if isinstance(v, _Vector) else self.constant(v) for v in given)
        key = (function, *map(id, sources))
        if key not in self.known:
            self.known[key] = _Vector(self, function, sources)
            self.ops.append(self.known[key])
        return self.known[key]


def _binary(function: Any) -> Callable[[_Vector, Any], _Vector]:
    return lambda self, other: self.tape.apply(function, self, other)


def _turned(function: Any) -> Callable[[_Vector, Any], _Vector]:
    return lambda self, other: self.tape.apply(function, other, self)


class _Vector:
    """Stands for a vector while a rule is followed; numpy's functions and comparisons refuse it."""

    __array_ufunc__ = None

    def __init__(
        self, tape: _Tape, function: Any = None, sources: tuple[_Vector, ...] = (), value: float = 0.0
    ) -> None:
        self.tape, self.function, self.sources, self.value = tape, function, sources, value

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("what the rule does depends on a vector's values")

    __add__, __radd__ = _binary(np.add), _turned(np.add)
    __sub__, __rsub__ = _binary(np.subtract), _turned(np.subtract)
    __mul__, __rmul__ = _binary(np.multiply), _turned(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _turned(np.true_divide)
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __neg__(self) -> _Vector:
        return self.tape.apply(np.negative, self)

    def __pow__(self, power: Any) -> _Vector:
        if type(power) in (int, float) and power in _SHORT:
            return self.tape.apply(_SHORT[power], self)
        return self.tape.apply(np.power, self, power)


class Program:
    """The steps of one exchange on a block, over a list of arrays.

    The list: local, seen, centre, the memory, the spare centre, the spare memory, constants, scratch.

    Attributes:
        reads_seen: bool. Whether the rule looks at what the worker last saw.
        changed: list of int. Which memory vectors are written.
    """

    def __init__(self, tape: _Tape, inputs: list[_Vector], new: _Vector, kept: list[_Vector]) -> None:
        self._tape, self._inputs, self._new, self._kept = tape, inputs, new, kept
        self.changed = [i for i, vector in enumerate(kept) if vector is not inputs[MEMORY + i]]
        self.reads_seen = False
        self._steps: list[tuple[Any, ...]] = []
        self._spare = len(inputs)
        self._first = 2 * len(inputs) - MEMORY + 1  # of the constants
        self._scratch = 0

    def place(self, adopted: _Vector, shown: _Vector, keep_seen: bool | None) -> Self:
        """Give every result its place in the list; ``keep_seen=None`` writes seen where the rule reads it."""
        new, kept, spare = self._new, self._kept, self._spare
        rooms = [(kept[i], spare + 1 + i) for i in self.changed]
        ops = _needed(self._tape.ops, [new, adopted, shown, *(vector for vector, _ in rooms)])
        looked_at = [new, adopted, *(vector for vector, _ in rooms), *(source for op in ops for source in op.sources)]
        self.reads_seen = any(vector is self._inputs[SEEN] for vector in looked_at)
        where = {vector: i for i, vector in enumerate(self._inputs)}
        where |= {vector: self._first + i for i, vector in enumerate(self._tape.constants)}
        targets = {**dict(rooms), new: spare}
        if ops and adopted is ops[-1] and adopted not in targets and self._inputs[LOCAL] not in targets:
            targets[adopted] = LOCAL  # nothing looks at local any more
        last = {source: n for n, op in enumerate(ops) for source in op.sources}
        begin = self._first + len(self._tape.constants)
        free: list[int] = []
        for n, op in enumerate(ops):
            given = [where[source] for source in op.sources]
            ended = {s for s in op.sources if last[s] == n and where[s] >= begin and s is not adopted}
            free += [where[source] for source in ended]
            if op in targets:
                where[op] = targets[op]
            elif free:
                where[op] = free.pop()
            else:
                where[op] = begin + self._scratch
                self._scratch += 1
            self._steps.append((op.function, *given, where[op]))
        moves = [(new, spare), *rooms, (adopted, LOCAL)]
        if keep_seen or (keep_seen is None and self.reads_seen):
            moves.append((shown, SEEN))
        for vector, target in moves:
            if where[vector] != target:
                self._steps.append((np.copyto, target, where[vector]))
                where[vector] = target if target >= spare else where[vector]
        return self

    def run(self, inputs: list[Array], spares: list[Array], blocks: list[slice], scratch: list[Array]) -> None:
        """Run all steps over one block after another.

        Args:
            inputs: local, seen, centre and the memory vectors.
            spares: where the new centre and the new memory vectors go.
            blocks: parts of the vectors, none longer than a block of scratch.
            scratch: blocks that are kept from one exchange to the next; grows as needed.
        """
        kind, size = inputs[CENTRE].dtype, max((part.stop - part.start for part in blocks), default=0)
        constants = [np.asarray(constant.value, kind) for constant in self._tape.constants]
        scratch += [np.empty(size, kind) for _ in range(self._scratch - len(scratch))]
        used = scratch[: self._scratch]
        for part in blocks:
            length = part.stop - part.start
            values = [vector[part] for vector in (*inputs, *spares)] + constants + [block[:length] for block in used]
            for function, *places in self._steps:
                function(*[values[i] for i in places])


def _needed(ops: list[_Vector], outputs: list[_Vector]) -> list[_Vector]:
    """The operations that the outputs depend on, in their order."""
    needed: set[_Vector] = set()
    while outputs:
        vector = outputs.pop()
        if vector not in needed:
            needed.add(vector)
            outputs.extend(vector.sources)
    return [op for op in ops if op in needed]


def follow(rule: Rule, window: int, meeting: Any, memories: int) -> Program | None:
    """Call a rule's three functions once with stand-ins.

    Args:
        rule: Rule. Elementwise.
        window: int. Given to ``propose``.
        meeting: given to ``merge``.
        memories: int. How many memory vectors there are.

    Returns:
        Program, or None for a rule that cannot be followed, or that fails: it fails again, and is heard, when it
        is called with vectors.

    Example:
        >>> class Elastic:
        ...     shows, elementwise = "before", True
        ...     def propose(self, local, seen, window): return local
        ...     def merge(self, centre, message, meeting, memory): return centre + 0.5 * (message - centre), memory
        ...     def adopt(self, local, shown): return local - 0.5 * (local - shown)
        >>> program = follow(Elastic(), 1, None, 0)
        >>> local, centre, spare = np.full(3, 4.0), np.zeros(3), np.empty(3)
        >>> program.run([local, centre, centre], [spare], [slice(0, 3)], [])
        >>> local.tolist(), spare.tolist(), program.reads_seen
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], False)
    """
    tape = _Tape()
    inputs = [_Vector(tape) for _ in range(MEMORY + memories)]
    try:
        message = rule.propose(inputs[LOCAL], inputs[SEEN], window)
        new, kept = rule.merge(inputs[CENTRE], message, meeting, tuple(inputs[MEMORY:]))
        shown = inputs[CENTRE] if rule.shows == "before" else new
        adopted = rule.adopt(inputs[LOCAL], shown)
    except Exception:
        return None
    results = [new, adopted, *kept]
    if len(results) != 2 + memories or not all(isinstance(vector, _Vector) for vector in results):
        return None
    return Program(tape, inputs, new, list(kept)).place(adopted, shown, getattr(rule, "uses_seen", None))
