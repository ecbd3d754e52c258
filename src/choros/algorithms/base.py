"""What every algorithm is: a frozen dataclass with three pure functions.

Vectors are one-dimensional arrays of any library with ``+ - * /``, ``**`` and ``.sum()``: numpy, JAX and
PyTorch alike. Nothing here, or in any file of this folder, imports more than the standard library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

Vector = Any
Memory = tuple[Vector, ...]


class Meeting(NamedTuple):
    """What is known when a message reaches the centre.

    ``workers``: how many were averaged into the message. ``staleness``: merges by others since the sender
    last saw the centre. ``sender``: the sender's rank (0 where all meet together).
    """

    workers: int = 1
    staleness: int = 0
    sender: int = 0


@dataclass(frozen=True)
class Algorithm:
    """The base of all: propose the local vector, the centre becomes the message, go on with the centre.

    Class attributes:
        meets: "together", "alone" or "never": how the workers meet by default.
        shows: "before" or "after" the merge: which centre the worker is shown.
        level: "parameters" or "gradients": what the vector is.
        weighted: True where the mean over workers is weighted by the rows each trained.
        elementwise: True where the functions may be applied block by block.
        momentum: Nesterov momentum around the compiled optimizer's step; 0 is none.
    """

    meets: ClassVar[Literal["together", "alone", "never"]] = "together"
    shows: ClassVar[Literal["before", "after"]] = "after"
    level: ClassVar[Literal["parameters", "gradients"]] = "parameters"
    weighted: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    window: int = 1

    def __post_init__(self) -> None:
        """Refuse hyper-parameters that are not numbers, and windows below one step."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}({field.name}={value}): give a finite number.")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 0:
            raise ValueError(
                f"{type(self).__name__}(window={self.window!r}): give a whole number of optimizer steps, 1 or more."
            )

    @property
    def momentum(self) -> float:
        """Nesterov momentum that the worker applies around the compiled optimizer's step."""
        return 0.0

    def bound(self, workers: int, learning_rate: float, *, strict: bool = True) -> Self:
        """Fill in what depends on the number of workers and check stability; ``strict=False`` only warns."""
        return self

    def start(self, centre: Vector, workers: int = 1) -> Memory:
        """Return what the centre remembers besides itself: vectors of the centre's shape."""
        return ()

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return what a worker puts forward after ``window`` optimizer steps."""
        return local

    def merge(self, centre: Vector, message: Vector, meeting: Meeting, memory: Memory) -> tuple[Vector, Memory]:
        """Return the new centre and the new memory."""
        return message, memory

    def adopt(self, local: Vector, shown: Vector) -> Vector:
        """Return what the worker goes on with."""
        return shown
