"""Membership of an elastic job: decisions without processes, clocks or sockets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from choros.cluster import Slots, is_this_machine

STARTING, READY, IN, LEAVING = "starting", "ready", "in", "leaving"


@dataclass(eq=False)
class Member:
    """One process of the job, as long as it lives.

    Attributes:
        number: int. Which process, from 0, in the order in which they were started; never used again.
        host: str. As it was named.
        slot: int. The lowest place on its machine that nobody had.
        began: float. When it was started, in seconds of a monotonic clock.
        state: str. STARTING until it asks for its place; READY while it waits for one; IN a generation; LEAVING.
        rank: int. In the last generation; -1 for one that was in none.
        sync: bool. Whether it wants the state of rank 0 when it goes on.
        suspect: bool. Whether another rank has waited for it in vain.
        sent, answered: int. Signs of life asked for, and the last one that was answered.
        until: float. When it is killed, if it has not ended by then.
    """

    number: int
    host: str
    slot: int
    began: float = 0.0
    state: str = STARTING
    rank: int = -1
    sync: bool = True
    suspect: bool = False
    sent: int = 0
    answered: int = 0
    until: float = float("inf")

    @property
    def machine(self) -> str:
        """The machine of a rank, as a value that ranks on one machine share."""
        return "" if is_this_machine(self.host) else self.host


def vacancies(slots: Slots, members: Iterable[Member], barred: Collection[str], most: int | None) -> list[str]:
    """The hosts on which processes should be started, one name for each.

    Args:
        slots: the hosts that there are, and how many ranks each may have.
        members: those that live, and do not leave.
        barred: hosts that get no new ones.
        most: how many there may be in all; None for as many as there are slots.

    Example:
        >>> vacancies((("a", 2), ("b", 2)), [Member(0, "a", 0)], set(), 3)
        ['a', 'b']
        >>> vacancies((("a", 2), ("b", 2)), [Member(0, "a", 0)], {"a"}, None)
        ['b', 'b']
    """
    hosts = [member.host for member in members]
    free = [host for host, count in slots if host not in barred for _ in range(count - hosts.count(host))]
    return free if most is None else free[: max(most - len(hosts), 0)]


def surplus(slots: Slots, members: Iterable[Member]) -> list[Member]:
    """Those for whom there is no slot any more: of each host those that have been in the job for the shortest time.

    Example:
        >>> first, second = Member(0, "a", 0, rank=1), Member(1, "a", 1, rank=0)
        >>> [member.number for member in surplus((("a", 1),), [first, second])]
        [0]
    """
    left, found = dict(slots), []
    for member in ordered(members):
        left[member.host] = left.get(member.host, 0) - 1
        if left[member.host] < 0:
            found.append(member)
    return found


def ordered(members: Iterable[Member]) -> list[Member]:
    """In the order of their ranks: first those that have the state, as they were, then those that are new.

    Example:
        >>> [m.number for m in ordered([Member(2, "a", 0), Member(1, "a", 1, rank=2), Member(0, "b", 0, rank=0)])]
        [0, 1, 2]
    """
    return sorted(members, key=lambda member: (member.rank < 0, member.rank, member.number))


def places(members: Sequence[Member]) -> list[dict[str, int]]:
    """The place of each, under the names that ``choros.cluster.Place`` has for it.

    Args:
        members: in the order of their ranks.

    Example:
        >>> places([Member(0, "a", 0), Member(1, "b", 0), Member(2, "a", 1)])[2]
        {'rank': 2, 'size': 3, 'local_rank': 1, 'local_size': 2, 'node': 0, 'nodes': 2}
    """
    machines = [member.machine for member in members]
    nodes = list(dict.fromkeys(machines))
    return [
        {
            "rank": rank,
            "size": len(members),
            "local_rank": machines[:rank].count(machine),
            "local_size": machines.count(machine),
            "node": nodes.index(machine),
            "nodes": len(nodes),
        }
        for rank, machine in enumerate(machines)
    ]


class Blacklist:
    """Hosts whose ranks have failed: they get no new ones, for ever or until a cool-down is over.

    Args:
        cooldown: the shortest and the longest cool-down, in seconds; None: for ever.
        clock: seconds that pass.
        draw: ``random.uniform``, or what stands for it.

    Example:
        >>> now = [0.0]
        >>> black = Blacklist((10.0, 60.0), clock=lambda: now[0], draw=lambda low, high: high)
        >>> [black.bar("n1") for _ in range(3)]
        [20.0, 40.0, 60.0]
        >>> black.barred()
        {'n1'}
        >>> now[0] = 61.0
        >>> black.barred()
        set()
    """

    def __init__(
        self,
        cooldown: tuple[float, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._cooldown, self._clock, self._draw = cooldown, clock, draw
        self._until: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def bar(self, host: str) -> float:
        """A rank of the host has failed: return for how many seconds it is out, more each time; infinite: for ever."""
        if self._cooldown is None:
            self._until[host] = float("inf")
            return float("inf")
        low, high = self._cooldown
        times = self._times[host] = self._times.get(host, 0) + 1
        seconds = self._draw(min(high, low * 2.0 ** min(times - 1, 60)), min(high, low * 2.0 ** min(times, 60)))
        self._until[host] = max(self._until.get(host, 0.0), self._clock() + seconds)
        return seconds

    def barred(self, ever: bool = False) -> set[str]:
        """The hosts that are out now; those that never come back, with ``ever``."""
        now = float("inf") if ever else self._clock()
        return {host for host, until in self._until.items() if until > now or (ever and until == now)}
