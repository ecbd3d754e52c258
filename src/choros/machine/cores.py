"""The cores that this process may use, and their division among ranks of one machine.

Read from the affinity mask, never from ``os.cpu_count()``: ``mpirun``, SLURM and containers give a process less than
the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from choros.errors import BadInput

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Binding:
    """The cores and threads of one rank.

    Attributes:
        cores: tuple of int. The logical cores it is bound to; empty means not bound.
        threads: int. How many threads its framework should run.

    Example:
        >>> Binding((0, 1), 2).threads
        2
    """

    cores: tuple[int, ...]
    threads: int


def usable_cores() -> tuple[int, ...]:
    """The logical cores that this process may run on, in ascending order.

    Returns:
        The affinity mask; all cores where the system has none (macOS).

    Example:
        >>> len(usable_cores()) >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(usable: Sequence[int] | None = None, topology: Path = TOPOLOGY) -> list[tuple[int, ...]]:
    """The usable logical cores grouped by physical core, those of one socket side by side.

    Args:
        usable: the logical cores to group; ``usable_cores()`` when None.
        topology: where the kernel describes its cores.

    Returns:
        One tuple a physical core, of the hyper-threads of it that are usable. A logical core that the kernel does
        not describe counts as a physical one.

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
    """Share this machine's cores among ranks: equal, disjoint and neighbouring; what is left over is the caller's.

    With enough physical cores each rank gets whole ones, ``threads`` being their number; with fewer, each gets as
    many logical ones; with more ranks than logical cores none is bound and each runs one thread.

    Args:
        ranks: how many ranks run on this machine.
        threads: the threads of each rank, instead of what its share allows.
        bind: False binds none; the number of threads is the same.
        cores: the physical cores to share, each the tuple of its logical ones; ``physical_cores()`` when None.

    Returns:
        One binding a rank.

    Raises:
        BadInput: ``ranks`` or ``threads`` is below 1.

    Example:
        >>> plan(2, cores=[(0, 4), (1, 5), (2, 6), (3, 7)])
        [Binding(cores=(0, 1, 4, 5), threads=2), Binding(cores=(2, 3, 6, 7), threads=2)]
        >>> plan(3, cores=[(0,), (1,)])
        [Binding(cores=(), threads=1), Binding(cores=(), threads=1), Binding(cores=(), threads=1)]
    """
    if ranks < 1:
        raise BadInput(f"ranks must be 1 or more, got {ranks}")
    if threads is not None and threads < 1:
        raise BadInput(f"threads must be 1 or more, got {threads}")
    physical = [tuple(core) for core in (physical_cores() if cores is None else cores)]
    logical = [one for core in physical for one in core]
    if ranks > len(logical):
        return [Binding((), threads or 1)] * ranks
    units = physical if ranks <= len(physical) else [(one,) for one in logical]
    share = len(units) // ranks
    bindings = []
    for rank in range(ranks):
        mine = sorted(one for unit in units[rank * share : (rank + 1) * share] for one in unit)
        bindings.append(Binding(tuple(mine) if bind else (), threads or share))
    return bindings


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
