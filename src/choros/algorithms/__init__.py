"""All algorithms: the lookup by name and the conversion to and from JSON.

``choros.algorithms()`` lists them, because this module is callable. ``choros.algorithms.AEASGD`` is one of them.

Example:
    >>> import choros.algorithms
    >>> choros.algorithms.by_name("local-sgd")
    LocalSGD(window=8)
    >>> choros.algorithms()["Single"]
    'One worker, plain Keras: the baseline that the others are measured against.'
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

from choros.algorithms.adag import ADAG
from choros.algorithms.aeasgd import AEASGD
from choros.algorithms.agn import AGN
from choros.algorithms.allreduce import AllReduce
from choros.algorithms.averaging import Averaging
from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector
from choros.algorithms.diloco import DiLoCo
from choros.algorithms.downpour import DOWNPOUR
from choros.algorithms.dynsgd import DynSGD
from choros.algorithms.eamsgd import EAMSGD
from choros.algorithms.easgd import EASGD
from choros.algorithms.ensemble import Ensemble
from choros.algorithms.legacy import MeanEASGD
from choros.algorithms.localsgd import LocalSGD
from choros.algorithms.single import Single
from choros.errors import UnknownAlgorithmError

__all__ = [
    "ADAG",
    "AEASGD",
    "AGN",
    "ALL",
    "DOWNPOUR",
    "EAMSGD",
    "EASGD",
    "Algorithm",
    "AllReduce",
    "Averaging",
    "DiLoCo",
    "DynSGD",
    "Ensemble",
    "ExchangeInfo",
    "LocalSGD",
    "Memory",
    "Single",
    "Vector",
    "by_name",
    "from_config",
    "is_custom",
    "list_algorithms",
    "to_config",
]

ALL: tuple[type[Algorithm], ...] = (
    Single,
    AllReduce,
    Averaging,
    LocalSGD,
    EASGD,
    AEASGD,
    EAMSGD,
    DOWNPOUR,
    AGN,
    ADAG,
    DynSGD,
    DiLoCo,
    Ensemble,
)

_OLD = (MeanEASGD,)  # reachable only through old names; not listed, but workers can look them up


def list_algorithms() -> dict[str, str]:
    """Return the name of every algorithm with the first line of its docstring.

    Example:
        >>> list(list_algorithms())[:3]
        ['Single', 'AllReduce', 'Averaging']
    """
    return {kind.__name__: (kind.__doc__ or "").strip().splitlines()[0] for kind in ALL}


def by_name(algorithm: str | Algorithm | type[Algorithm]) -> Algorithm:
    """Return an algorithm, given as an object, a class or a name.

    Args:
        algorithm: an ``Algorithm``, a class of one, or a name. Only the letters and digits of a name count, and case
            does not matter.

    Returns:
        The object itself, or an object with the default hyper-parameters.

    Raises:
        UnknownAlgorithmError: no algorithm has that name.
        TypeError: ``algorithm`` is neither an algorithm nor a name.

    Example:
        >>> by_name("all_reduce")
        AllReduce(window=1)
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm()
    if not isinstance(algorithm, str):
        raise TypeError(
            f"an algorithm is an object such as choros.AEASGD(window=32) or a name such as 'aeasgd', not {algorithm!r}."
        )
    return _kind(algorithm)()


def is_custom(algorithm: Algorithm) -> bool:
    """Return whether the class of an algorithm is the user's, which ``from_config`` cannot find by its name."""
    return type(algorithm) not in (*ALL, *_OLD)


def to_config(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm as plain JSON: its name and its hyper-parameters.

    Example:
        >>> to_config(AEASGD(alpha=0.25))
        {'name': 'AEASGD', 'window': 8, 'alpha': 0.25}
    """
    return {
        "name": type(algorithm).__name__,
        **{field.name: getattr(algorithm, field.name) for field in fields(algorithm)},
    }


def from_config(config: dict[str, Any], kind: type[Algorithm] | None = None) -> Algorithm:
    """Return the algorithm that ``to_config`` described.

    Args:
        config: the name and the hyper-parameters.
        kind: the class of a custom algorithm. None looks the name up.

    Example:
        >>> from_config({"name": "AEASGD", "window": 8, "alpha": 0.25})
        AEASGD(window=8, alpha=0.25)
    """
    if kind is None:
        old = {each.__name__: each for each in _OLD}
        kind = old.get(config["name"]) or _kind(config["name"])
    return kind(**{name: value for name, value in config.items() if name != "name"})


def _kind(name: str) -> type[Algorithm]:
    kinds = {kind.__name__.lower(): kind for kind in ALL}
    plain = "".join(character for character in name.lower() if character.isalnum())
    if plain in kinds:
        return kinds[plain]
    near = difflib.get_close_matches(plain, kinds, n=1, cutoff=0.65)
    meant = f"did you mean {kinds[near[0]].__name__!r}? There are" if near else "there are"
    raise UnknownAlgorithmError(f"No algorithm is called {name!r}: {meant} {', '.join(kind.__name__ for kind in ALL)}.")


class _Callable(ModuleType):
    """A module that can be called: ``choros.algorithms()``."""

    def __call__(self) -> dict[str, str]:
        return list_algorithms()


sys.modules[__name__].__class__ = _Callable
