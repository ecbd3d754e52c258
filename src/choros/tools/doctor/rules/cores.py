"""Rules about cores and threads: ranks that share cores, too many threads, unused cores."""

from __future__ import annotations

from collections.abc import Iterator

from choros.cluster.hardware.thread_env import COUNTS
from choros.errors import counted
from choros.tools.doctor.facts import Facts
from choros.tools.doctor.findings import ERROR, WARNING, Finding, Observations, Rule, alike, made

_MANY = 4  # cores for each thread of a rank from which there are too few threads
_OMP, _AFFINITY, _BLOCKTIME = "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"


def threads_of(facts: Facts) -> int:
    """Return the number of threads of a rank: that of ``OMP_NUM_THREADS``, else one for each core.

    Example:
        >>> threads_of({"threads": {"OMP_NUM_THREADS": "8"}, "cores": {"usable": [0, 1]}})
        8
    """
    return _number(facts["threads"].get(_OMP)) or len(facts["cores"]["usable"])


def _number(text: str | None) -> int:
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def crowded(seen: Observations) -> Iterator[Finding]:
    """Find more ranks than cores, on a whole machine or on the cores to which the ranks are bound."""
    for some in seen.machines():
        named: set[int] = set()
        for cores in sorted({tuple(facts["cores"]["usable"]) for facts in some}, key=len):
            inside = [
                facts for facts in some if set(facts["cores"]["usable"]) <= set(cores) and facts["rank"] not in named
            ]
            if len(inside) <= len(cores):
                continue
            named |= {facts["rank"] for facts in inside}
            all_cores = some[0]["cores"]["machine"]
            share = f"{{at}}: {len(inside)} ranks run on {counted(len(cores), 'core')} ({_few(cores)})"
            if len(some) > all_cores:
                yield made(
                    ERROR,
                    "oversubscribed",
                    inside,
                    f"{share}, which is all that the host has.",
                    f"Start at most {all_cores} ranks on a host like it (-n {all_cores}, --ppn, --ntasks-per-node), or "
                    "take more hosts.",
                )
            else:
                yield made(
                    ERROR,
                    "bound-together",
                    inside,
                    f"{share}, of the host's {all_cores}.",
                    "Give each rank cores of its own: choros run does; mpiexec --bind-to core (MPICH: -bind-to core), "
                    "srun --cpu-bind=cores --cpus-per-task=K; or ask for more cores, or start fewer ranks.",
                )


def together(some: list[Facts]) -> list[list[Facts]]:
    """Group the ranks of a machine that share cores, directly or through other ranks."""
    groups: list[tuple[set[int], list[Facts]]] = []
    for facts in some:
        cores, members = set(facts["cores"]["usable"]), [facts]
        for other in [group for group in groups if group[0] & cores]:
            groups.remove(other)
            cores, members = cores | other[0], other[1] + members
        groups.append((cores, members))
    return [members for _, members in groups]


def union(some: list[Facts]) -> set[int]:
    """Return the cores that any of the ranks may use."""
    return {core for facts in some for core in facts["cores"]["usable"]}


def threads(seen: Observations) -> Iterator[Finding]:
    """Find more threads than cores."""
    reported: set[int] = set()
    for (name, value, count), some in alike(
        [{"name": name, "each": facts} for facts in seen.ranks for name in facts["threads"] if name in COUNTS],
        lambda one: (one["name"], one["each"]["threads"][one["name"]], len(one["each"]["cores"]["usable"])),
    ):
        if _number(value) > count:
            ranks = [entry["each"] for entry in some]
            reported |= {facts["rank"] for facts in ranks}
            yield made(
                ERROR,
                "threads",
                ranks,
                f"{{at}}: {name}={value}, but each rank has {counted(count, 'core')}.",
                f"Set {name}={count}, or unset it and start the ranks with choros run, which sets it.",
            )
    busy = {rank for finding in crowded(seen) for rank in finding.ranks}
    for some in (part for machine in seen.machines() for part in together(machine)):
        cores, run = len(union(some)), sum(map(threads_of, some))
        if len(some) > 1 and run > cores and not (reported | busy) & {facts["rank"] for facts in some}:
            torch = any(str(facts["backend"]).startswith("torch") for facts in some)
            yield made(
                ERROR if torch else WARNING,
                "threads",
                some,
                f"{{at}} share {counted(cores, 'core')} and run {run} threads in all"
                + (", which on PyTorch wait for each other by spinning." if torch else "."),
                f"Export {_OMP}={max(cores // len(some), 1)} (and NPROC, TF_NUM_INTRAOP_THREADS), or bind each rank to "
                "cores of its own; choros run does both. A script that imports choros before Keras sets them too.",
            )


def openmp(seen: Observations) -> Iterator[Finding]:
    """Find settings of Intel's OpenMP by the user that slow ranks with common cores."""
    for some in (part for machine in seen.machines() for part in together(machine)):
        pinned = [facts for facts in some if _pins(facts["threads"].get(_AFFINITY, ""))]
        if len(pinned) > 1:
            yield made(
                ERROR,
                "kmp-affinity",
                pinned,
                f"{{at}} share {counted(len(union(some)), 'core')}, and {_AFFINITY}={pinned[0]['threads'][_AFFINITY]} "
                "pins the threads of each rank to the same first cores.",
                f"Unset {_AFFINITY}, which choros sets for ranks with cores of their own, or bind the ranks, as "
                "choros run does.",
            )
        spinning = [facts for facts in some if facts["threads"].get(_BLOCKTIME, "0") not in ("0", "")]
        if spinning and len(some) > 1:
            yield made(
                WARNING,
                "kmp-blocktime",
                spinning,
                f"{{at}} share {counted(len(union(some)), 'core')}, and with "
                f"{_BLOCKTIME}={spinning[0]['threads'][_BLOCKTIME]} "
                "a thread spins for so many milliseconds after each parallel region, on a core of other ranks.",
                f"Export {_BLOCKTIME}=0, or unset it: choros sets 0.",
            )


def _pins(affinity: str) -> bool:
    return any(word in affinity for word in ("compact", "scatter", "balanced", "explicit", "proclist"))


def idle(seen: Observations) -> Iterator[Finding]:
    """Find ranks with few threads on many cores (torchrun sets one), and ranks bound to few cores of the allocation."""
    for some in (part for machine in seen.machines() for part in together(machine)):
        share = len(union(some)) // len(some)
        few = [facts for facts in some if facts["threads"].get(_OMP) and threads_of(facts) * _MANY <= share]
        if few:
            torchrun = " (torchrun sets it)" if few[0]["launcher"] == "torchrun" else ""
            yield made(
                WARNING,
                "idle-cores",
                few,
                f"{{at}}: {_OMP}={few[0]['threads'][_OMP]}{torchrun}, but each rank has {counted(share, 'core')}.",
                f"Export {_OMP}={share} before the launcher.",
            )
    for some in seen.machines() if len(seen.ranks) == seen.size else []:
        bound, allotted = len(union(some)), max(len(facts["cores"]["allotted"]) for facts in some)
        if 0 < 2 * bound <= allotted:
            yield made(
                WARNING,
                "idle-cores",
                some,
                f"{{at}}: bound to {counted(bound, 'core')} in all, of the {allotted} that their launcher has.",
                "Bind wider: Open MPI binds a rank to one core unless told --bind-to none or --map-by slot:PE="
                f"{max(allotted // len(some), 1)}; MPICH: -bind-to none; or take taskset away.",
            )


def numa(seen: Observations) -> Iterator[Finding]:
    """Find ranks that are bound to several NUMA nodes although one has enough cores."""
    across = []
    for facts in seen.ranks:
        cores, nodes = set(facts["cores"]["usable"]), [set(node) for node in facts["cores"]["numa"]]
        touched = [node for node in nodes if node & cores]
        if len(touched) > 1 and len(cores) < facts["cores"]["machine"] and len(cores) <= max(map(len, nodes)):
            across.append(facts)
    if across:
        yield made(
            WARNING,
            "numa",
            across,
            "{at}: bound to cores of several NUMA nodes, so half of the memory accesses are remote.",
            "Bind each rank within one: mpiexec --map-by numa --bind-to numa, srun --cpu-bind=ldoms, under PALS "
            "--cpu-bind list:...",
        )


def quota(seen: Observations) -> Iterator[Finding]:
    """Find a control group that allows less CPU time than the threads need; the affinity mask does not show it."""
    for some in seen.machines():
        allowed = min((facts["cores"]["quota"] for facts in some if facts["cores"]["quota"]), default=0.0)
        run = sum(map(threads_of, some))
        if allowed and run > 1.5 * allowed:
            yield made(
                ERROR,
                "quota",
                some,
                f"{{at}}: the container or control group allows the time of {allowed:g} cores, but {run} threads run.",
                f"Ask for more (resources.limits.cpu, docker --cpus, CPUQuota), or export {_OMP}="
                f"{max(int(allowed // len(some)), 1)}" + (", or start fewer ranks." if len(some) > allowed else "."),
            )


def _few(cores: tuple[int, ...]) -> str:
    return ",".join(map(str, cores[:8])) + (",..." if len(cores) > 8 else "")


RULES: tuple[Rule, ...] = (crowded, threads, openmp, idle, numa, quota)
