"""Interface of an update rule: the part of ``choros.algorithms.Algorithm`` that a parameter server calls."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from choros.algorithms import ExchangeInfo, Memory, Vector


class _Functions(Protocol):
    """Three pure functions of vectors. ``Vector`` is an array of any library, or a stand-in while a rule is traced.

    ``trace_rule``, ``SharedMemoryParameterServer`` and ``ShardedParameterServer`` also read ``uses_seen``, if the rule
    has it. If it is False, they do not write the shown center to ``seen``.
    """

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's message to the center."""
        ...

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory, /) -> tuple[Vector, Memory]:
        """Return the new center and the new memory. A memory vector that is returned unchanged is not written."""
        ...

    def adopt(self, local: Vector, shown: Vector) -> Vector:
        """Return the worker's next local vector."""
        ...


class _RuleOfClass(_Functions, Protocol):
    """A rule whose class has the two properties, as an ``Algorithm``."""

    shows: ClassVar[Literal["before", "after"]]  # the center that the worker is shown: before or after the merge
    elementwise: ClassVar[bool]  # whether the functions may be applied block by block


class _RuleOfObject(_Functions, Protocol):
    """A rule whose objects have the two properties, as ``ShardRule``."""

    @property
    def shows(self) -> Literal["before", "after"]:
        """As in ``_RuleOfClass``."""
        ...

    @property
    def elementwise(self) -> bool:
        """As in ``_RuleOfClass``."""
        ...


MergeRule = _RuleOfClass | _RuleOfObject
