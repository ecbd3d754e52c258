"""The base class of the algorithms: a frozen dataclass with three pure functions.

Vectors are one-dimensional arrays of any library with ``+ - * /``, ``**`` and ``.sum()``: numpy, JAX and
PyTorch alike. This package imports only the standard library and ``choros.errors``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, Self

from choros.errors import InvalidInputError, UnstableAlgorithmError

Vector = Any
Memory = tuple[Vector, ...]
TINY = 1e-30  # avoids 0 / 0; negligible beside any square that matters


class ExchangeInfo(NamedTuple):
    """Facts about a message that reaches the center.

    ``workers``: the number of workers averaged into the message. ``staleness``: merges by other workers since the
    sender last saw the center. ``sender``: the rank of the sender (0 in synchronous exchanges).
    """

    workers: int = 1
    staleness: int = 0
    sender: int = 0


@dataclass(frozen=True)
class Algorithm:
    """The base of all algorithms: by default a message becomes the center, and workers adopt the center.

    An exchange is, for every algorithm, ::

        message        = propose(local, seen, window)
        center, memory = merge(center, message, info, memory)
        local          = adopt(local, shown)

    where ``seen`` is the center as the worker last saw it and ``shown`` is the center before or after the merge.
    The parameters ``center`` and ``info`` are the center and an ``ExchangeInfo``.

    A rule sees the weights only, never gradients: ``local``, ``seen``, ``center`` and ``memory`` are flat vectors. Each
    memory vector has the center's shape; there is no place for a scalar. ``local - seen`` is the update of the last
    window only if ``adopt`` returns ``shown``. If workers are synchronous and adopt the center, ``seen`` is the center
    before the merge, bit for bit. A new value of each exchange needs a field of ``ExchangeInfo``, which
    the parameter servers (``choros.param_server``) and ``SyncExchange`` then set.

    Attributes:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 1.
        mode: "sync" (all ranks exchange at once), "async" (each with the parameter server) or None (no exchange).
        shows: "before" or "after": whether a worker gets the center before or after the merge.
        level: "parameters", or "gradients" (``AllReduce`` only). Gradients are summed at each step by
            ``choros.training.worker.allreduce_steps``; training does not call ``propose``, ``merge`` and ``adopt``.
        weighted: True where the mean over workers is weighted by the rows that each worker trained.
        elementwise: True where the functions may be applied block by block. Must be False if a result depends on other
            elements (``.sum()``, a norm; see ``ADAG``). The functions then get whole vectors, and the center is not
            divided among hosts.
        uses_seen: False where ``propose`` does not read ``seen``, which then need not be kept.
        momentum: Nesterov momentum around the compiled optimizer's step; 0 is none. A rule with a momentum of its own
            at the center needs another name for it, as ``DiLoCo.outer_momentum``.

    Example:
        >>> Algorithm(window=4).merge(1.0, 3.0, ExchangeInfo(workers=2), ())
        (3.0, ())
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "sync"
    shows: ClassVar[Literal["before", "after"]] = "after"
    level: ClassVar[Literal["parameters", "gradients"]] = "parameters"
    weighted: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    window: int = 1

    def __post_init__(self) -> None:
        """Convert hyper-parameters to plain numbers; refuse wrong types and values that are negative or not finite."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and "None" in str(field.type):
                continue
            object.__setattr__(self, field.name, self._number(field.name, str(field.type), value))

    def _number(self, name: str, kind: str, value: Any) -> bool | int | float:
        if kind.startswith("bool"):
            return bool(value) if value in (True, False) else self.refuse(name, "give True or False")
        if kind.startswith("int"):
            is_count = not isinstance(value, bool) and hasattr(value, "__index__") and int(value) >= 0
            return int(value) if is_count else self.refuse(name, "give a whole number of steps, 0 for once an epoch")
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= 0
        return float(value) if number else self.refuse(name, "give a finite number, 0 or more")

    def refuse(self, name: str, remedy: str) -> Any:
        """Raise ``InvalidInputError`` with the name of the wrong hyper-parameter and the remedy."""
        raise InvalidInputError(f"{type(self).__name__}({name}={getattr(self, name)!r}): {remedy}.")

    def unstable(self, workers: int, learning_rate: float, remedy: str, strict: bool) -> None:
        """Raise ``UnstableAlgorithmError`` if ``strict``, else warn (``RuntimeWarning``)."""
        message = f"{self!r} is unstable with {workers} workers at learning rate {learning_rate:.4g}: {remedy}."
        if strict:
            raise UnstableAlgorithmError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def unused(self) -> dict[str, str]:
        """Return the arguments that were given and have no effect, each with the reason; ``Trainer`` warns of them."""
        if self.mode is None and self.window != type(self).window:
            return {"window": "its workers never exchange"}
        return {}

    @property
    def uses_seen(self) -> bool:
        """True if ``propose`` may read ``seen``; if False, ``seen`` need not be kept."""
        return type(self).propose is not Algorithm.propose

    @property
    def momentum(self) -> float:
        """Nesterov momentum that the worker applies around the compiled optimizer's step."""
        return 0.0

    def bound(self, workers: int, learning_rate: float, *, strict: bool = True) -> Self:
        """Fill in the hyper-parameters that depend on the number of workers, and check stability.

        Args:
            workers: int. The number of workers that will exchange.
            learning_rate: float. The learning rate of the compiled optimizer.
            strict: bool. If False, unstable hyper-parameters only warn (RuntimeWarning). Defaults to True.

        Returns:
            The algorithm with every hyper-parameter set.

        Raises:
            UnstableAlgorithmError: the hyper-parameters are outside the stability bound, which the message states.
        """
        return self

    def start(self, center: Vector, workers: int = 1) -> Memory:
        """Return the state that the rule keeps beside the center: vectors of the center's shape.

        An algorithm imports no array library, as it works on vectors of numpy, JAX and PyTorch. ``(0 * center,)`` is a
        vector of zeros.
        """
        return ()

    def replaced(self, center: Vector, memory: Memory) -> Memory:
        """Return the memory for a center that a callback has set; by default it is unchanged."""
        return memory

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the message that a worker sends after ``window`` optimizer steps."""
        return local

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Return the new center and the new memory."""
        return message, memory

    def adopt(self, local: Vector, shown: Vector) -> Vector:
        """Return the weights with which the worker continues."""
        return shown
