"""Ranks of several hosts: those of one host add up in shared memory, and one of each host adds up between the hosts.

So a vector crosses the network once a host instead of once a rank. Who is missing, whether all make the same call, and
who has left is found out among all ranks, as in every group of messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from choros.comm.call_signature import BROADCAST, SUM, SUM_SLOTS
from choros.comm.dtypes import dtype_code, numeric
from choros.comm.group import Group
from choros.comm.host_identity import machine
from choros.comm.p2p.group import MessageGroup
from choros.comm.shm.group import SharedGroup, share
from choros.errors import ChorosError
from choros.types import Array


class HierarchicalGroup(MessageGroup):
    """All ranks of several hosts; implements ``choros.comm.group.Group``.

    A sum is made in the order of the ranks within each host, and then in that of the hosts: bit-equal on all ranks, and
    equal to that of a flat group up to rounding.

    Args:
        wide: MessageGroup. All ranks; its messages are used, under a name of their own.
        own: bool. Close ``wide`` with this one. Defaults to False.

    Attributes:
        hosts: list of lists of int. The ranks of each host.

    Raises:
        PeerLostError, CommTimeoutError: a rank has gone or does not come.

    Example, in a script that ``mpiexec -hosts n1:2,n2:2`` starts::

        group = HierarchicalGroup(MpiGroup())
        group.hosts  # [[0, 1], [2, 3]]
    """

    def __init__(self, wide: MessageGroup, *, own: bool = False) -> None:
        super().__init__(wide.among(range(wide.size)), wide.timeout)
        self._wide = wide if own else None
        self.hosts = hosts_of(self)
        self._mine = next(ranks for ranks in self.hosts if self.rank in ranks)
        lead = self._mine[0] == self.rank
        beside = MessageGroup(self.among(self._mine), self.timeout)
        segment = share(beside, SharedGroup.create(len(self._mine)) if lead else None)
        beside.close()
        self._near = SharedGroup(segment, self._mine.index(self.rank), self.timeout, spin=self._spin)
        self._segment = segment
        leaders = [ranks[0] for ranks in self.hosts]
        self._far = MessageGroup(self.among(leaders), self.timeout) if lead else None

    @property
    def kind(self) -> str:
        """The kind of the group, for people."""
        return f"{super().kind} over {len(self.hosts)} hosts, sums in each host first"

    def part(self, ranks: Sequence[int]) -> MessageGroup:
        """Return the group of some of the ranks, in that order; only they call, all at the same time."""
        flat = super().part(ranks)
        return HierarchicalGroup(flat, own=True) if worth_it(hosts_of(flat)) else flat

    def slot(self, count: int, dtype: Any) -> Array:
        """This rank's buffer of ``count`` values, in its host's memory."""
        return self._near.slot(count, numeric(dtype))

    def sum_slots(self, count: int, dtype: Any) -> Array:
        """Sum all slots; a read-only view of the result, bit-equal on every rank, good until the next call."""
        kind = numeric(dtype)
        if count * kind.itemsize <= self._inline:
            return super().sum_slots(count, dtype)
        self._meet((SUM_SLOTS, count, *dtype_code(kind)))
        return self._across(count, kind)

    def sum(self, x: Array) -> Array:
        """A new array of the same shape and dtype: the sum over ranks. Overwrites the slot."""
        x = np.asarray(x)
        kind = numeric(x.dtype)
        if x.nbytes <= self._inline:
            return super().sum(x)
        self._meet((SUM, x.size, *dtype_code(kind)))
        self.slot(x.size, kind)[:] = x.reshape(-1)
        return self._across(x.size, kind).reshape(x.shape).copy()

    def _across(self, count: int, kind: Any) -> Array:
        begin = 0 if self.trace is None else time.monotonic_ns()
        self._near.timeout = self.timeout
        try:
            found = self._near.sum_slots(count, kind, self._between)
        except ChorosError as error:
            self._give_up(error)
            raise
        self._told("reduce", begin, found.nbytes)
        return found

    def _between(self, whole: Array) -> None:
        """Make the host's sum that of all hosts."""
        far = self._far
        if far is None or far.size == 1:
            return
        far.timeout = self.timeout
        far.slot(whole.size, whole.dtype)[:] = whole
        whole[:] = far.sum_slots(whole.size, whole.dtype)

    def give_up(self, reason: str) -> None:
        """Have this host's waits, now or later, raise ``PeerLostError``; any thread may call."""
        super().give_up(reason)
        self._near.give_up(reason)
        if self._far is not None:
            self._far.give_up(reason)

    def _give_up(self, error: ChorosError) -> None:
        """Tell those of this host, who wait in its memory, that a rank of another one is missing."""
        self._broken = f"{type(error).__name__}: {error}"
        SharedGroup.abort(self._segment, str(error))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's array on every rank, a new array; shape and dtype are the same everywhere."""
        x = np.asarray(x)
        if x.nbytes <= self._inline or not 0 <= root < self.size or x.dtype.hasobject:
            return super().broadcast(x, root)
        self._meet((BROADCAST + 256 * root, x.size, *dtype_code(x.dtype.newbyteorder("="))))
        near, far, home = self._near, self._far, next(i for i, ranks in enumerate(self.hosts) if root in ranks)
        near.timeout = self.timeout
        here = root in self._mine
        try:
            if here:
                x = near.broadcast(x, self._mine.index(root))
            if far is not None:
                far.timeout = self.timeout
                x = far.broadcast(x, home)
            return x if here else near.broadcast(x, 0)
        except ChorosError as error:
            self._give_up(error)
            raise

    def _end(self, limit: float | None = None) -> None:
        if not self._closed and hasattr(self, "_near"):
            self._near.close()
            self._segment.close()
            if self._far is not None:
                self._far.close()
            if self._wide is not None:
                self._wide.close()
        super()._end(limit)


def hosts_of(group: Group) -> list[list[int]]:
    """Return the ranks of each host, the hosts in the order of their first ranks; all ranks call.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> hosts_of(SingleRankGroup())
        [[0]]
    """
    machines = group.gather(machine().encode())
    return [[rank for rank, one in enumerate(machines) if one == host] for host in dict.fromkeys(machines)]


def worth_it(hosts: list[list[int]]) -> bool:
    """Return whether ranks of these hosts are to add up in each host first.

    Example:
        >>> worth_it([[0, 1], [2, 3]]), worth_it([[0], [1]]), worth_it([[0, 1]])
        (True, False, False)
    """
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)
