"""Membership of an elastic job: pure decisions, without processes or sockets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from choros.cluster import Slots, is_this_machine

STARTING, READY, IN, LEAVING = "starting", "ready", "in", "leaving"


@dataclass(eq=False)
class Member:
    """One running process of the job.

    Attributes:
        number: int. The number of the process, from 0, in the order of the starts; never reused.
        host: str. The host's name, as given.
        slot: int. The lowest slot of its host that was free at its start.
        began: float. The time of its start, in seconds of a monotonic clock.
        state: str. STARTING until it requests a place; READY while it waits for one; IN a generation; LEAVING.
        rank: int. The rank in the last generation; -1 if it was in none.
        sync: bool. Whether it needs the state of rank 0 when it continues.
        suspect: bool. Whether another rank has waited for it until a timeout.
        sent, answered: int. The number of pings sent, and of the last one that was answered.
        until: float. The time at which it is killed if it has not ended.
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
        """The host as a key that all processes on it share: "" for this host."""
        return "" if is_this_machine(self.host) else self.host


def vacancies(slots: Slots, members: Iterable[Member], barred: Collection[str], most: int | None) -> list[str]:
    """Return the hosts on which to start processes, one name for each process.

    Args:
        slots: the hosts and their slots (numbers of ranks).
        members: the processes that run and do not leave.
        barred: the hosts that get no new processes.
        most: the largest number of processes; None for the number of slots.

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
    """Return the processes without a slot: on each host those with the highest ranks, new processes first.

    Example:
        >>> first, second = Member(0, "a", 0, rank=1), Member(1, "a", 1, rank=0)
        >>> [member.number for member in surplus((("a", 1),), [first, second])]
        [0]
    """
    free, chosen = dict(slots), []
    for member in ordered(members):
        free[member.host] = free.get(member.host, 0) - 1
        if free[member.host] < 0:
            chosen.append(member)
    return chosen


def ordered(members: Iterable[Member]) -> list[Member]:
    """Sort processes for new ranks: first those with a rank, in rank order, as they have the state; then new ones.

    Example:
        >>> [m.number for m in ordered([Member(2, "a", 0), Member(1, "a", 1, rank=2), Member(0, "b", 0, rank=0)])]
        [0, 1, 2]
    """
    return sorted(members, key=lambda member: (member.rank < 0, member.rank, member.number))


def places(members: Sequence[Member]) -> list[dict[str, int]]:
    """Return the place of each process, under the names of ``choros.cluster.Place``.

    Args:
        members: the processes in the order of their ranks.

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
    """Hosts whose ranks have failed: they get no new ranks until a cool-down is over, or forever.

    Args:
        cooldown: the shortest and the longest cool-down, in seconds. Defaults to None, forever.
        clock: function that returns monotonic seconds.
        draw: ``random.uniform``, or a substitute in tests.

    Example:
        >>> now = [0.0]
        >>> blacklist = Blacklist((10.0, 60.0), clock=lambda: now[0], draw=lambda low, high: high)
        >>> [blacklist.bar("n1") for _ in range(3)]
        [20.0, 40.0, 60.0]
        >>> blacklist.barred()
        {'n1'}
        >>> now[0] = 61.0
        >>> blacklist.barred()
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
        self._failures: dict[str, int] = {}

    def bar(self, host: str) -> float:
        """Bar a host after a failure; return the seconds: longer after each failure, infinity for forever."""
        if self._cooldown is None:
            self._until[host] = float("inf")
            return float("inf")
        low, high = self._cooldown
        failures = self._failures[host] = self._failures.get(host, 0) + 1
        seconds = self._draw(min(high, low * 2.0 ** min(failures - 1, 60)), min(high, low * 2.0 ** min(failures, 60)))
        self._until[host] = max(self._until.get(host, 0.0), self._clock() + seconds)
        return seconds

    def barred(self, ever: bool = False) -> set[str]:
        """Return the hosts that are barred now; with ``ever``, those that are barred forever."""
        now = float("inf") if ever else self._clock()
        return {host for host, until in self._until.items() if until > now or (ever and until == now)}
