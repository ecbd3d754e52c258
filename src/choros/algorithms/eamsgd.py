"""Elastic averaging with momentum, each worker in its own time."""

from __future__ import annotations

from dataclasses import dataclass

from choros.algorithms.aeasgd import AEASGD


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    """AEASGD whose workers have Nesterov momentum around the compiled optimizer's own step.

    ::

        v_k <- mu v_k + u(x_k + mu v_k),   x_k <- x_k + v_k     window times
        e = alpha (x_k - c),   x_k <- x_k - e,   c <- c + e     one atomic exchange

    Zhang, Choromanska, LeCun 2015 (1412.6651), algorithm 2. u is the step of the compiled optimizer, taken at
    the look-ahead point x + mu v; x, and not that point, is exchanged. dist-keras looked back (x - mu v), which
    diverges where the paper converges, and multiplied the step by a second learning rate.
    Not good on top of an optimizer with momentum of its own (Adam, SGD(momentum=)): steps become 1 / (1 - mu)
    times longer. So the default is 0.5; with plain SGD inside give 0.9 to 0.99, as the paper does.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.
        alpha: float. The elastic force; None is 0.9 / workers.
        momentum: float. mu, below 1.

    Example:
        >>> EAMSGD(momentum=0.9).momentum
        0.9
    """

    momentum: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a momentum that never forgets."""
        super().__post_init__()
        if self.momentum >= 1:
            self.refuse("momentum", "give a number from 0 to below 1, for example 0.9")
