"""Named operation: a group's ``doing`` has its name while it lasts, and the group's trace receives its times."""

from __future__ import annotations

import time
from typing import Self

from choros.comm.group import Group


class TracedOperation:
    """Context manager that names and times an operation of a group.

    Args:
        group: Group.
        kind: str. "call", or "step" for a step of an optimizer.
        text: str. Description for messages. If it is not known yet, the block sets ``group.doing``. Defaults to "".
        nbytes: int. Size of the data in bytes; -1, the default, if it is unknown.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> group, events = SingleRankGroup(), []
        >>> group.trace = events.append
        >>> with TracedOperation(group, "call", "allreduce 'loss'", 12):
        ...     group.doing
        "allreduce 'loss'"
        >>> group.doing, [(kind, name, end >= begin, nbytes) for kind, name, begin, end, nbytes in events]
        ('', [('call', "allreduce 'loss'", True, 12)])
    """

    __slots__ = ("begin", "group", "kind", "nbytes", "text")

    def __init__(self, group: Group, kind: str, text: str = "", nbytes: int = -1) -> None:
        self.group, self.kind, self.text, self.nbytes, self.begin = group, kind, text, nbytes, 0

    def __enter__(self) -> Self:
        group = self.group
        if self.text:
            group.doing = self.text
        if group.trace is not None:
            self.begin = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        group = self.group
        if self.begin and group.trace is not None:
            group.trace((self.kind, group.doing or self.kind, self.begin, time.monotonic_ns(), self.nbytes))
        group.doing = ""
