"""The arguments ``timeline`` and ``profile`` of a ``Trainer``: their checks, their part of the job, and the file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from choros.argument_checks import check_path
from choros.backends.profiler import window_of
from choros.comm import trace_format
from choros.errors import InvalidInputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """The records of a fit besides its history.

    Attributes:
        timeline: str. The absolute path of the timeline's file, or "" for none.
        profile: dict. The field ``profile`` of ``FitConfig``, or None.
    """

    timeline: str = ""
    profile: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        timeline: str | os.PathLike[str] | None,
        profile: str | os.PathLike[str] | None,
        profile_batches: tuple[int, int],
        rank: int,
    ) -> Recording:
        """Check the arguments of a ``Trainer``.

        Args:
            timeline: the file, or None.
            profile: the directory, or None.
            profile_batches: (first, last) step of a worker.
            rank: int. Of a job's processes only rank 0 writes the timeline.

        Raises:
            InvalidInputError: the file cannot be written, or the steps are not a window.

        Example:
            >>> Recording.of(None, "profile", (2, 3), rank=0).profile["steps"]
            2
        """
        path = ""
        if timeline is not None:
            try:
                path = os.path.abspath(os.fsdecode(timeline)) if rank else trace_format.writable_path(timeline)
            except (OSError, TypeError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise InvalidInputError(f"timeline={timeline!r} cannot be written: {reason}.") from None
        first, steps = window_of(profile_batches)
        window: dict[str, Any] | None = None
        if profile is not None:
            window = {"directory": os.path.abspath(check_path("profile", profile)), "first_step": first, "steps": steps}
        return cls(path, window)

    def config(self) -> dict[str, Any]:
        """Return the fields of a ``FitConfig``. The timeline begins now."""
        return {"timeline": list(trace_format.clock()) if self.timeline else None, "profile": self.profile}

    def write(self, lanes: list[bytes]) -> None:
        """Write the timeline, if this process has the lanes. A file that cannot be written only causes a warning."""
        if not (self.timeline and lanes):
            return
        try:
            trace_format.write(self.timeline, lanes)
        except OSError as error:
            logger.warning(f"the timeline cannot be written to {self.timeline}: {error.strerror}")
