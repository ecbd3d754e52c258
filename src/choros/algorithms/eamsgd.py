"""Asynchronous elastic averaging with momentum."""

from __future__ import annotations

from dataclasses import dataclass

from choros.algorithms.aeasgd import AEASGD


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    """AEASGD whose workers have Nesterov momentum around the compiled optimizer's step.

    ::

        v_k <- mu v_k + u(x_k + mu v_k),   x_k <- x_k + v_k     window times
        e = alpha (x_k - c),   x_k <- x_k - e,   c <- c + e     one atomic exchange

    Zhang, Choromanska, LeCun 2015 (1412.6651), algorithm 2. u is the step of the compiled optimizer, computed at
    the look-ahead point x + mu v; the exchange sends x, not that point. dist-keras looked back (x - mu v), which
    diverges where the paper's rule converges, and multiplied the step by a second learning rate.
    Not good with an optimizer that already has momentum (Adam, SGD(momentum=)): steps become 1 / (1 - mu) times
    longer. Hence the default of 0.5. With plain SGD give 0.9 to 0.99, as in the paper.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.
        alpha: float. The elastic force; None is 0.9 / workers. Defaults to None.
        momentum: float. mu, below 1. Defaults to 0.5.

    Example:
        >>> EAMSGD(momentum=0.9).momentum
        0.9
    """

    momentum: float = 0.5  # pyright: ignore[reportIncompatibleMethodOverride] - a field in place of the property

    def __post_init__(self) -> None:
        """Refuse a momentum of 1 or more, at which old steps never decay."""
        super().__post_init__()
        if self.momentum >= 1:
            self.refuse("momentum", "give a number from 0 to below 1, for example 0.9")
