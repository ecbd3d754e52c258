"""A call that a group knows by its name while it lasts, and that the group's trace takes down when it ends."""

from __future__ import annotations

import time
from typing import Self

from choros.comm.group import Group


class TracedOperation:
    """Say what the caller is about, for as long as a ``with`` lasts.

    Args:
        group: Group.
        kind: str. "call", or "step" for an optimizer's.
        text: str. In words. Where it is not known yet, ``group.doing`` is set within.
        nbytes: int. What the call is about weighs; -1 where that is not known.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> group, taken = SingleRankGroup(), []
        >>> group.trace = taken.append
        >>> with TracedOperation(group, "call", "allreduce 'loss'", 12):
        ...     group.doing
        "allreduce 'loss'"
        >>> group.doing, [(kind, name, end >= begin, nbytes) for kind, name, begin, end, nbytes in taken]
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
