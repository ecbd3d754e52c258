"""The backend's profiler on some of the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from choros.argument_checks import check_whole
from choros.callbacks.profile import Profile
from choros.errors import InvalidInputError
from choros.hvd.context import rank
from choros.object_text import call_text


class ProfileCallback(Profile):
    """Callback that runs the backend's profiler for a window of steps, on rank 0 or the given ranks.

    See ``choros.callbacks.Profile``. Rank N's files are in ``directory/rank-N``.

    Args:
        directory: str or path. Created if missing.
        first_step: int. Steps of this ``fit`` before the window, which should include compilation. Defaults to 10.
        steps: int. Steps in the window. Defaults to 5.
        ranks: ints. The ranks that profile. Defaults to rank 0.

    Raises:
        InvalidInputError: the numbers do not make a window.

    Example:
        >>> callback = ProfileCallback("profile", first_step=20, steps=3)
        >>> callback.first_step, callback.steps
        (20, 3)
    """

    def __init__(
        self, directory: str | os.PathLike[str], first_step: int = 10, steps: int = 5, ranks: Sequence[int] = (0,)
    ) -> None:
        first, steps = check_whole("first_step", first_step, 0), check_whole("steps", steps, 1)
        super().__init__(directory, (first, first + steps - 1))
        if not isinstance(ranks, Iterable):
            raise InvalidInputError(f"ranks={ranks!r}: give a list of ranks.")
        self.ranks = [check_whole("ranks", rank, 0) for rank in ranks]

    def __repr__(self) -> str:
        return call_text(self, self.directory, first_step=self.first_step, steps=self.steps, ranks=self.ranks)

    def mine(self) -> str | None:
        """Return the name of this rank's directory; None if this rank does not profile."""
        return f"rank-{rank()}" if rank() in self.ranks else None
