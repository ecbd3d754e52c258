"""The steps of one rank of ``choros doctor``: collect facts, connect, measure, train, and share the results."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choros.backend_choice import BACKENDS
from choros.comm.bootstrap.discover_rank import find_place
from choros.errors import ChorosError
from choros.tools.doctor import smoke_processes
from choros.tools.doctor.facts import Facts, look
from choros.tools.doctor.findings import NEED, Observations, available_memory

if TYPE_CHECKING:
    from choros.comm.group import Group

HAND = "CHOROS_DOCTOR"  # the descriptor of memory from which the starter of this rank reads its results


@dataclass(frozen=True)
class CheckOptions:
    """The options of one diagnosis.

    Attributes:
        train: bool. Whether to train on the backends. Defaults to True.
        backends: tuple of str. The backends to train on. Defaults to all that every rank has installed.
        timeout: float. Seconds that ranks wait for each other. Defaults to 60.
        smoke_timeout: float. Time limit of one training in seconds. Defaults to 180.
    """

    train: bool = True
    backends: tuple[str, ...] = ()
    timeout: float = 60.0
    smoke_timeout: float = smoke_processes.SECONDS


class RankCheck:
    """The diagnosis by one rank. ``seen`` is valid at any time.

    Args:
        wish: CheckOptions.

    Attributes:
        rank: int. This rank; 0 if it is unknown.
        seen: Observations. The observations so far; before the ranks communicate, only those of this rank.
        broken: bool. Whether there were failures, such as ranks that could not connect.
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
        """All observations so far."""
        return Observations(self.size, self._ranks, self._measures, self._smoke, self._troubles)

    def run(self) -> Observations:
        """Run all steps, and stop at the first failure.

        Returns:
            The observations.

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
        local_facts = look(place)
        self._ranks = [local_facts]
        self.hand()
        for name, end in smoke_processes.probe(
            ["numpy", *(["mpi4py"] if local_facts["engine"] == "MPI" else [])]
        ).items():
            if name == "numpy" or end["signal"]:  # for other errors of mpi4py, the group's error has the advice
                self._trouble(
                    "probe",
                    f"Rank {self.rank} on {local_facts['host']} cannot load {name}: a process that tried",
                    **end,
                )
        if not self._troubles:
            self._together(local_facts)
        self.hand()
        return self.seen

    def hand(self, report: Mapping[str, Any] | None = None) -> None:
        """Write the results for the process that started this rank, if it requested them.

        Args:
            report: the report of the whole job, which rank 0 has at the end. Defaults to None.
        """
        fd = os.environ.get(HAND)
        if fd:
            message = {"ranks": self._ranks, "troubles": self._troubles, "report": report}
            data = json.dumps(message).encode()
            os.ftruncate(int(fd), 0)
            os.pwrite(int(fd), data, 0)

    def _trouble(self, kind: str, text: str, **more: Any) -> None:
        self.broken = True
        self._troubles.append({"rank": self.rank, "host": platform.node(), "kind": kind, "text": text, **more})

    def _together(self, local_facts: Facts) -> None:
        """Run the steps that need communication between ranks."""
        from choros.comm.host_identity import machine
        from choros.comm.single_rank_group import SingleRankGroup

        local_facts["machine"] = machine()
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
            self._meet(group, local_facts)
        except (ChorosError, OSError, MemoryError) as error:
            self._trouble("lost", str(error), missing=list(getattr(error, "missing", ())))
            return
        if self.size == 1:
            group.close()

    def _meet(self, group: Group, local_facts: Facts) -> None:
        from choros.comm.shared_values import gather_values
        from choros.tools.doctor.link_bandwidth import links
        from choros.tools.doctor.measurements import measure

        group.doing = "choros doctor: what each rank found"
        self._ranks = gather_values(group, local_facts)
        available = min(available_memory(some) for some in self.seen.machines())
        group.doing = "choros doctor: measuring"
        self._measures = measure(group, min(available, 1 << 31), self._engines(group))
        self._measures["links"] = links(group, [some[0]["rank"] for some in self.seen.machines()], available)
        group.doing = ""
        if self.wish.train and available >= NEED // 2:
            self._train(group)
        group.barrier()  # no rank exits while another one still needs it

    def _engines(self, group: Group) -> dict[str, Group]:
        """Return the groups by which the ranks communicate, or could communicate, by name."""
        if group.size == 1:
            return {}
        from choros.comm.group import kind_of

        groups: dict[str, Group] = {kind_of(group): group}
        if self._ranks[0]["engine"] == "MPI" and len(self.seen.machines()) == 1:
            from choros.comm.bootstrap.init import in_shared_memory

            groups["shared memory"] = in_shared_memory(group)
        return groups

    def _train(self, group: Group) -> None:
        """Train on each backend in helper processes; those of one machine form a job."""
        from choros.comm.bootstrap.init import part
        from choros.comm.shared_values import gather_values

        mates = next(some for some in self.seen.machines() if any(facts["rank"] == self.rank for facts in some))
        ranks = [facts["rank"] for facts in mates]
        local: Group | None = None
        if len(ranks) > 1:
            local = group if len(ranks) == self.size else part(group, ranks)
        for backend in self.backends():
            group.doing = f"choros doctor: training on {backend}"
            group.timeout = self.wish.timeout + self.wish.smoke_timeout
            result = self._trained(backend, local)
            for rank, end in enumerate(gather_values(group, result)):
                self._smoke.setdefault(rank, []).append(end)
            group.timeout = self.wish.timeout
        group.doing = ""

    def backends(self) -> tuple[str, ...]:
        """Return the backends to train on: the requested ones, else those that every rank has installed."""
        if self.wish.backends:
            return self.wish.backends
        return tuple(name for name in BACKENDS if all(facts["versions"].get(name) for facts in self._ranks))

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
