"""The schedule of exchanges: one after a number of optimizer steps."""

from __future__ import annotations


class Schedule:
    """Counts the optimizer steps since the last meeting.

    Args:
        window: int. Optimizer steps between two meetings; 0 is never by itself, but at the end of each epoch.

    Attributes:
        pending: int. Steps since the last meeting; what a worker still has to bring when it ends.

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
        """Count ``steps`` more; tell whether it is time to meet."""
        self.pending += steps
        return 0 < self.window <= self.pending

    def room(self) -> int | None:
        """Return how many steps may be made before the next meeting; None is as many as the epoch has."""
        return max(self.window - self.pending, 0) if self.window else None

    def reset(self) -> int:
        """Begin a new window; return the steps of the one that ends."""
        pending, self.pending = self.pending, 0
        return pending
