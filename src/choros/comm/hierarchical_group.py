"""Hierarchical all-reduce: first among the ranks of each host in shared memory, then among one rank of each host.

So a vector crosses the network once for each host instead of once for each rank. All ranks still exchange a frame
before each call, as in every group of messages. So missing ranks, different calls and ranks that left are noticed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

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

    A sum is made in the order of the ranks within each host, and then in the order of the hosts. The result is
    bit-equal on all ranks, and equal to that of a flat group up to rounding.

    Args:
        base: MessageGroup. All ranks. This group sends its messages on a separate channel of ``base``.
        close_base: bool. Close ``base`` together with this group. Defaults to False.

    Attributes:
        hosts: list of lists of int. The ranks of each host.

    Raises:
        PeerLostError: a rank died or left. CommTimeoutError: a rank did not join within the time limit.

    Example, in a script that ``mpiexec -hosts n1:2,n2:2`` starts::

        group = HierarchicalGroup(MpiGroup())
        group.hosts  # [[0, 1], [2, 3]]
    """

    def __init__(self, base: MessageGroup, *, close_base: bool = False) -> None:
        # Its own channel: a late frame of ``base`` must not be taken for a frame of this group.
        super().__init__(base.among(range(base.size)), base.timeout)
        self._base = base if close_base else None
        self.hosts = hosts_of(self)
        self._host_ranks = next(ranks for ranks in self.hosts if self.rank in ranks)
        is_leader = self._host_ranks[0] == self.rank
        # Needed once, to pass the segment. Afterwards the host's ranks communicate by shared memory alone.
        host_messages = MessageGroup(self.among(self._host_ranks), self.timeout)
        segment = share(host_messages, SharedGroup.create(len(self._host_ranks)) if is_leader else None)
        host_messages.close()
        # The segment and not its descriptor: ``_abort_host`` uses the segment too, so this object closes it.
        self._host_group = SharedGroup(segment, self._host_ranks.index(self.rank), self.timeout, spin=self._spin)
        self._segment = segment
        leaders = [ranks[0] for ranks in self.hosts]
        self._leader_group = MessageGroup(self.among(leaders), self.timeout) if is_leader else None

    @property
    def kind(self) -> str:
        """The kind of the group, for messages."""
        return f"{super().kind} over {len(self.hosts)} hosts, sums in each host first"

    def part(self, ranks: Sequence[int]) -> MessageGroup:
        """Return a group of some of the ranks, in that order. These ranks alone call, all at the same time."""
        flat = super().part(ranks)
        return HierarchicalGroup(flat, close_base=True) if is_hierarchical(hosts_of(flat)) else flat

    def slot(self, count: int, dtype: DTypeLike) -> Array:
        """Return this rank's buffer of ``count`` values, in its host's shared memory."""
        return self._host_group.slot(count, numeric(dtype))

    def sum_slots(self, count: int, dtype: DTypeLike) -> Array:
        """Sum all slots; return a read-only view of the result, bit-equal on every rank, valid until the next call."""
        value_dtype = numeric(dtype)
        if count * value_dtype.itemsize <= self._inline:
            return super().sum_slots(count, dtype)
        self._begin_call((SUM_SLOTS, count, *dtype_code(value_dtype)))
        return self._sum_across_hosts(count, value_dtype)

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks, a new array of the same shape and dtype. Overwrites the slot."""
        x = np.asarray(x)
        dtype = numeric(x.dtype)
        if x.nbytes <= self._inline:
            return super().sum(x)
        self._begin_call((SUM, x.size, *dtype_code(dtype)))
        self.slot(x.size, dtype)[:] = x.reshape(-1)
        return self._sum_across_hosts(x.size, dtype).reshape(x.shape).copy()

    def _sum_across_hosts(self, count: int, dtype: DTypeLike) -> Array:
        begin = 0 if self.trace is None else time.monotonic_ns()
        # The caller may set the time limit between calls, and the inner group has a limit of its own.
        self._host_group.timeout = self.timeout
        try:
            result = self._host_group.sum_slots(count, dtype, self._add_other_hosts)
        except ChorosError as error:
            self._abort_host(error)
            raise
        self._record_trace("reduce", begin, result.nbytes)
        return result

    def _add_other_hosts(self, host_sum: Array) -> None:
        """Replace this host's sum by the sum of all hosts. Only the host's first rank has work to do."""
        leader_group = self._leader_group
        if leader_group is None or leader_group.size == 1:
            return
        leader_group.timeout = self.timeout
        leader_group.slot(host_sum.size, host_sum.dtype)[:] = host_sum
        host_sum[:] = leader_group.sum_slots(host_sum.size, host_sum.dtype)

    def give_up(self, reason: str) -> None:
        """Abort: all waits on this host, now or later, raise ``PeerLostError``; any thread may call."""
        super().give_up(reason)
        self._host_group.give_up(reason)
        if self._leader_group is not None:
            self._leader_group.give_up(reason)

    def _abort_host(self, error: ChorosError) -> None:
        """Abort the host's shared-memory group after an error, so that its other ranks do not wait in vain.

        Only the host's first rank communicates with other hosts. The others could not notice a rank that is missing
        there.
        """
        self._broken = f"{type(error).__name__}: {error}"
        SharedGroup.abort(self._segment, str(error))

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return the root's array on every rank, a new array; shape and dtype must be equal on all ranks."""
        x = np.asarray(x)
        if x.nbytes <= self._inline or not 0 <= root < self.size or x.dtype.hasobject:
            return super().broadcast(x, root)
        self._begin_call((BROADCAST + 256 * root, x.size, *dtype_code(x.dtype.newbyteorder("="))))
        host_group, leader_group = self._host_group, self._leader_group
        root_host = next(index for index, ranks in enumerate(self.hosts) if root in ranks)
        host_group.timeout = self.timeout
        root_is_local = root in self._host_ranks
        try:
            if root_is_local:
                x = host_group.broadcast(x, self._host_ranks.index(root))
            if leader_group is not None:
                leader_group.timeout = self.timeout
                x = leader_group.broadcast(x, root_host)
            return x if root_is_local else host_group.broadcast(x, 0)
        except ChorosError as error:
            self._abort_host(error)
            raise

    def _finish(self, limit: float | None = None) -> None:
        # ``hasattr``: atexit runs this also for an object whose ``__init__`` raised halfway.
        if not self._closed and hasattr(self, "_host_group"):
            self._host_group.close()
            self._segment.close()
            if self._leader_group is not None:
                self._leader_group.close()
            if self._base is not None:
                self._base.close()
        super()._finish(limit)


def hosts_of(group: Group) -> list[list[int]]:
    """Return the ranks of each host, the hosts in the order of their first ranks. All ranks call.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> hosts_of(SingleRankGroup())
        [[0]]
    """
    machine_names = group.gather(machine().encode())
    return [
        [rank for rank, machine_name in enumerate(machine_names) if machine_name == host]
        for host in dict.fromkeys(machine_names)
    ]


def is_hierarchical(hosts: list[list[int]]) -> bool:
    """Return whether a sum within each host first saves network traffic: several hosts, and one with several ranks.

    Example:
        >>> is_hierarchical([[0, 1], [2, 3]]), is_hierarchical([[0], [1]]), is_hierarchical([[0, 1]])
        (True, False, False)
    """
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)
