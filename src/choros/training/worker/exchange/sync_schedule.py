"""The schedule of exchanges: one exchange after every ``window`` optimizer steps."""

from __future__ import annotations


class Schedule:
    """Counter of the optimizer steps since the last exchange.

    Args:
        window: int. Optimizer steps between two exchanges. 0 means one exchange, at the end of each epoch.

    Attributes:
        pending: int. Steps since the last exchange, which are not merged yet.

    Raises:
        ValueError: the window is negative.

    Example:
        >>> schedule = Schedule(2)
        >>> schedule.due(), schedule.due(), schedule.reset()
        (False, True, 2)
        >>> schedule.due(), schedule.pending        # one step more, at the end: a last, partial window
        (False, 1)
    """

    def __init__(self, window: int) -> None:
        if window < 0:
            raise ValueError(f"a window of {window} optimizer steps: give 1 or more, or 0 for once an epoch.")
        self.window = window
        self.pending = 0

    def due(self, steps: int = 1) -> bool:
        """Add ``steps`` to the count, and return whether an exchange is due."""
        self.pending += steps
        return 0 < self.window <= self.pending

    def trial_steps(self, last_epoch: bool) -> int:
        """Return the number of steps by which a trial exchange divides, for rules that take the mean step of a window.

        Division by the steps so far would give the first steps of a window as much weight as a whole window. So the
        number is that of the whole window. After the last epoch the exchange that follows has the steps so far.
        """
        return self.pending if last_epoch else max(self.pending, self.window)

    def reset(self) -> int:
        """Begin a new window, and return the number of steps of the last one."""
        pending, self.pending = self.pending, 0
        return pending
