"""One rank of ``choros doctor``: look, meet, measure, train; and let rank 0 have what all found."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choros.comm.bootstrap.discover_rank import find_place
from choros.errors import ChorosError
from choros.tools.doctor import smoke_processes
from choros.tools.doctor.facts import Facts, look
from choros.tools.doctor.findings import NEED, Observations, room

if TYPE_CHECKING:
    from choros.comm.group import Group

HAND = "CHOROS_DOCTOR"  # the descriptor of memory in which whoever started this rank reads what it found


@dataclass(frozen=True)
class CheckOptions:
    """The options of one diagnosis.

    Attributes:
        train: bool. Train on the backends.
        backends: tuple of str. On which; empty for all that every rank has.
        timeout: float. Seconds that ranks wait for each other.
        smoke_timeout: float. Seconds that one training may take.
    """

    train: bool = True
    backends: tuple[str, ...] = ()
    timeout: float = 60.0
    smoke_timeout: float = smoke_processes.SECONDS


class RankCheck:
    """The facts that one rank knows so far; ``seen`` is valid at any time.

    Args:
        wish: CheckOptions.

    Attributes:
        rank: int. Which this is; 0 where that is unknown.
        seen: Observations. What is known: of this rank alone until the ranks have met.
        broken: bool. Whether the ranks did not meet, or not to the end.
    """

    def __init__(self, wish: CheckOptions) -> None:
        self.wish = wish
        self.rank, self.size, self.broken = 0, 1, False
        self._ranks: list[Facts] = []
        self._measures: dict[str, Any] = {}
        self._smoke: dict[int, list[Mapping[str, Any]]] = {}
        self._troubles: list[Mapping[str, Any]] = []

    @property
    def seen(self) -> Observations:
        """Everything that is known here."""
        return Observations(self.size, self._ranks, self._measures, self._smoke, self._troubles)

    def run(self) -> Observations:
        """Do it all, and end it where something does not work.

        Returns:
            What is known then.

        Example:
            >>> RankCheck(CheckOptions(train=False)).run().size >= 1
            True
        """
        try:
            place = find_place(self.wish.timeout)
        except ChorosError as error:
            self._trouble("place", str(error))
            return self.seen
        self.rank, self.size = place.rank, place.size
        own = look(place)
        self._ranks = [own]
        self.hand()
        for name, end in smoke_processes.probe(["numpy", *(["mpi4py"] if own["engine"] == "MPI" else [])]).items():
            if name == "numpy" or end["signal"]:  # of the others the group says what to install
                self._trouble(
                    "probe", f"Rank {self.rank} on {own['host']} cannot load {name}: a process that tried", **end
                )
        if not self._troubles:
            self._together(own)
        self.hand()
        return self.seen

    def hand(self, report: Mapping[str, Any] | None = None) -> None:
        """Leave what is known to whoever started this rank, if it asked for it.

        Args:
            report: the whole job's, which rank 0 has at the end.
        """
        fd = os.environ.get(HAND)
        if fd:
            found = {"ranks": self._ranks, "troubles": self._troubles, "report": report}
            data = json.dumps(found).encode()
            os.ftruncate(int(fd), 0)
            os.pwrite(int(fd), data, 0)

    def _trouble(self, kind: str, text: str, **more: Any) -> None:
        self.broken = True
        self._troubles.append({"rank": self.rank, "host": platform.node(), "kind": kind, "text": text, **more})

    def _together(self, own: Facts) -> None:
        """Everything for which the ranks meet."""
        from choros.comm.host_identity import machine
        from choros.comm.single_rank_group import SingleRankGroup

        own["machine"] = machine()
        try:
            group: Group = SingleRankGroup()
            if self.size > 1:
                from choros.comm.bootstrap.init import join

                group = join(self.rank, self.size, self.wish.timeout)
                group.timeout = self.wish.timeout
        except (ChorosError, OSError) as error:
            missing = list(getattr(error, "missing", ()))
            self._trouble("lost" if missing else "meeting", str(error), **({"missing": missing} if missing else {}))
            return
        try:
            self._meet(group, own)
        except (ChorosError, OSError, MemoryError) as error:
            self._trouble("lost", str(error), missing=list(getattr(error, "missing", ())))
            return
        if self.size == 1:
            group.close()

    def _meet(self, group: Group, own: Facts) -> None:
        from choros.tools.doctor.link_bandwidth import links
        from choros.tools.doctor.measurements import measure, tell

        group.doing = "choros doctor: what each rank found"
        self._ranks = tell(group, own)
        left = min(room(some) for some in self.seen.machines())
        group.doing = "choros doctor: measuring"
        self._measures = measure(group, min(left, 1 << 31), self._engines(group))
        self._measures["links"] = links(group, [some[0]["rank"] for some in self.seen.machines()], left)
        group.doing = ""
        if self.wish.train and left >= NEED // 2:
            self._train(group)
        group.barrier()  # no rank leaves while another still looks at it

    def _engines(self, group: Group) -> dict[str, Group]:
        """In what the ranks meet, and could meet, by name."""
        if group.size == 1:
            return {}
        from choros.comm.group import kind_of

        found: dict[str, Group] = {kind_of(group): group}
        if self._ranks[0]["engine"] == "MPI" and len(self.seen.machines()) == 1:
            from choros.comm.bootstrap.init import in_shared_memory

            found["shared memory"] = in_shared_memory(group)
        return found

    def _train(self, group: Group) -> None:
        """Train on each backend in processes beside the ranks, those of each machine together."""
        from choros.comm.bootstrap.init import part
        from choros.tools.doctor.measurements import tell

        mates = next(some for some in self.seen.machines() if any(one["rank"] == self.rank for one in some))
        ranks = [one["rank"] for one in mates]
        local: Group | None = None
        if len(ranks) > 1:
            local = group if len(ranks) == self.size else part(group, ranks)
        for backend in self.backends():
            group.doing = f"choros doctor: training on {backend}"
            group.timeout = self.wish.timeout + self.wish.smoke_timeout
            mine = self._trained(backend, local)
            for rank, end in enumerate(tell(group, mine)):
                self._smoke.setdefault(rank, []).append(end)
            group.timeout = self.wish.timeout
        group.doing = ""

    def backends(self) -> tuple[str, ...]:
        """On which backends is trained: those asked for, else those that every rank has."""
        if self.wish.backends:
            return self.wish.backends
        return tuple(
            name for name in smoke_processes.BACKENDS if all(each["versions"].get(name) for each in self._ranks)
        )

    def _trained(self, backend: str, local: Group | None) -> smoke_processes.End:
        if local is None:
            return smoke_processes.train(backend, 0, 1, None, self.wish.smoke_timeout)
        from choros.comm.shm.group import SharedGroup, share

        made = SharedGroup.create(local.size) if local.rank == 0 else None
        segment = share(local, made)
        try:
            return smoke_processes.train(backend, local.rank, local.size, segment.fd, self.wish.smoke_timeout)
        finally:
            segment.close()
