"""The cores that this process may use, and their division among ranks of one machine.

They are read from the affinity mask, not from ``os.cpu_count()``. ``mpirun``, SLURM and cpusets (``docker
--cpuset-cpus``) may allow a process fewer cores than the machine has. A quota of CPU time (``docker --cpus``) is not in
the mask and is ignored here; ``choros doctor`` reports it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from choros.errors import InvalidInputError

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Binding:
    """The cores and threads of one rank.

    Attributes:
        cores: tuple of int. The logical cores that the rank is bound to. Empty if it is not bound.
        threads: int. The number of threads for its framework.

    Example:
        >>> Binding((0, 1), 2).threads
        2
    """

    cores: tuple[int, ...]
    threads: int


def usable_cores() -> tuple[int, ...]:
    """Return the logical cores on which this process may run, in ascending order.

    Returns:
        The affinity mask, or all cores if the system has none (macOS).

    Example:
        >>> len(usable_cores()) >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(usable: Sequence[int] | None = None, topology: Path = TOPOLOGY) -> list[tuple[int, ...]]:
    """Return the usable logical cores grouped by physical core. Cores of one socket are contiguous.

    Args:
        usable: the logical cores to group. Defaults to ``usable_cores()``.
        topology: the directory in which the kernel describes cores.

    Returns:
        One tuple for each physical core, with its usable hyper-threads. A logical core that the kernel does not
        describe counts as a physical core.

    Example:
        >>> sum(len(core) for core in physical_cores()) == len(usable_cores())
        True
    """
    cores: dict[tuple[int, int], list[int]] = {}
    for logical in sorted(usable_cores() if usable is None else usable):
        folder = topology / f"cpu{logical}" / "topology"
        siblings = _text(folder / "thread_siblings_list") or _text(folder / "core_cpus_list")
        first = siblings.replace("-", ",").split(",")[0]
        socket = _text(folder / "physical_package_id")
        key = (int(socket) if socket.isdecimal() else 0, int(first) if first.isdecimal() else logical)
        cores.setdefault(key, []).append(logical)
    return [tuple(cores[key]) for key in sorted(cores)]


def plan(
    ranks: int,
    threads: int | None = None,
    bind: bool = True,
    *,
    cores: Sequence[Sequence[int]] | None = None,
) -> list[Binding]:
    """Divide this machine's cores into equal, disjoint, contiguous sets, one for each rank. A remainder stays unused.

    If there are enough physical cores, each rank gets whole physical cores, and one thread for each. If there are
    fewer, each rank gets the same number of logical cores. With more ranks than logical cores, no rank is bound and
    each runs one thread.

    Args:
        ranks: the number of ranks on this machine.
        threads: the number of threads of each rank. Defaults to the number of its cores.
        bind: False binds no rank. The number of threads is the same.
        cores: the physical cores to divide, each as a tuple of its logical ones. Defaults to ``physical_cores()``.

    Returns:
        One binding for each rank.

    Raises:
        InvalidInputError: ``ranks`` or ``threads`` is below 1.

    Example:
        >>> plan(2, cores=[(0, 4), (1, 5), (2, 6), (3, 7)])
        [Binding(cores=(0, 1, 4, 5), threads=2), Binding(cores=(2, 3, 6, 7), threads=2)]
        >>> plan(3, cores=[(0,), (1,)])
        [Binding(cores=(), threads=1), Binding(cores=(), threads=1), Binding(cores=(), threads=1)]
    """
    if ranks < 1:
        raise InvalidInputError(f"ranks must be 1 or more, got {ranks}")
    if threads is not None and threads < 1:
        raise InvalidInputError(f"threads must be 1 or more, got {threads}")
    physical = [tuple(core) for core in (physical_cores() if cores is None else cores)]
    logical = [number for core in physical for number in core]
    if ranks > len(logical):
        return [Binding((), threads or 1)] * ranks
    units = physical if ranks <= len(physical) else [(number,) for number in logical]
    share = len(units) // ranks
    bindings = []
    for rank in range(ranks):
        bound = sorted(number for unit in units[rank * share : (rank + 1) * share] for number in unit)
        bindings.append(Binding(tuple(bound) if bind else (), threads or share))
    return bindings


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
