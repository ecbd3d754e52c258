"""Creation of algorithms from names and hyper-parameters, for Params and the arguments of dist-keras."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from choros import algorithms
from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.algorithms.base import Algorithm


def by_name(algorithm: Any, **options: Any) -> Algorithm:
    """Return an algorithm with the given hyper-parameters.

    Args:
        algorithm: an algorithm, its class, its name, or a result of ``choros.algorithms.to_config``.
        options: hyper-parameters by name; None keeps the present value. ``rho`` is the parameter of dist-keras: alpha
            is rho times ``learning_rate``.

    Raises:
        UnknownAlgorithmError: no algorithm has this name.
        InvalidInputError: the algorithm has no such hyper-parameter, or its value is invalid.

    Example:
        >>> by_name("aeasgd", window=32, rho=5.0, learning_rate=0.01)
        AEASGD(window=32, alpha=0.05)
    """
    try:
        made = algorithms.from_config(algorithm) if isinstance(algorithm, dict) else algorithms.by_name(algorithm)
        rate = options.pop("learning_rate", None)
        given_options = {name: value for name, value in options.items() if value is not None}
        if "rho" in given_options and hasattr(made, "alpha"):
            rho = given_options.pop("rho")
            if rate is None:
                raise InvalidInputError("rho needs a learning rate, since alpha = rho * learning rate: set it too.")
            given_options["alpha"] = rho * rate
        known = [name for name in algorithms.to_config(made) if name != "name"]
        if wrong := [name for name in given_options if name not in known]:
            raise InvalidInputError(f"{type(made).__name__} has no {wrong[0]!r}: it has {', '.join(known)}.")
        return replace(made, **given_options)
    except InvalidInputError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInputError(str(error)) from None
