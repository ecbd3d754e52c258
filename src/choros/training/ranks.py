"""The group of a job's ranks: one a process, shared by all that meets in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint

from choros.cluster import Place
from choros.errors import BadInput
from choros.training.choice import MPI, SHARED, Choice, choose
from choros.transport import Group
from choros.transport.shared_group import SharedGroup, share

_joined: dict[str, Group] = {}


def join(rank: int, size: int, timeout: float) -> Group:
    """Return the group of this job's ranks; the same one for everything in a script.

    See ``choros.training.choice`` for which it is.

    Args:
        rank: int. This process, as its launcher says.
        size: int. All ranks, as the launcher says.
        timeout: float. Seconds that the ranks wait for each other.

    Raises:
        BadInput: there is nothing to meet in, or a group of another size or order than the launcher says.
    """
    if "group" not in _joined:
        choice = choose(Place.here())
        if choice.kind == MPI:
            _joined["group"] = _by_mpi(rank, size, timeout)
        elif choice.kind == SHARED:
            _joined["group"] = _shared(rank, size, timeout)
        else:
            _joined["group"] = _others(choice, rank, size, timeout)
    return _joined["group"]


def part(group: Group, ranks: Sequence[int]) -> Group | None:
    """Return the group of some of the ranks, None on the others; all of them call.

    Args:
        group: all ranks. Where it has no ``part`` of its own, the ranks share memory.
        ranks: who is in it, in this order.

    Raises:
        BadInput: ranks of several machines, and the group has no ``part``.
    """
    mine, own = group.rank in ranks, getattr(group, "part", None)
    if own is not None:
        made: Group | None = own(ranks) if mine else None
        return made
    return _share(group, list(ranks))


def in_shared_memory(group: Group) -> Group:
    """Return a group of the same ranks that meet in shared memory; all of them call.

    Args:
        group: all ranks, on one machine.

    Raises:
        BadInput: ranks of several machines.
    """
    made = _share(group, list(range(group.size)))
    assert made is not None  # noqa: S101 - every rank is in it
    return made


def _share(group: Group, ranks: list[int]) -> Group | None:
    made = SharedGroup.create(len(ranks)) if group.rank == ranks[0] else None
    segment = share(group, made, ranks[0])
    try:
        if group.rank not in ranks:
            return None
        return SharedGroup(os.dup(segment.fd), ranks.index(group.rank), timeout=group.timeout)
    finally:
        segment.close()


def _shared(rank: int, size: int, timeout: float) -> Group:
    descriptor = os.environ.get("CHOROS_GROUP_FD")
    if descriptor:
        group = SharedGroup(int(descriptor), rank, timeout=timeout)
        return _fitting(group, rank, size, f"Start them with `choros run -n {size} script.py`.")
    _joined["mpi"] = _by_mpi(rank, size, timeout)
    return in_shared_memory(_joined["mpi"])


def _by_mpi(rank: int, size: int, timeout: float) -> Group:
    from choros.transport import mpi
    from choros.transport.mpi_group import MpiGroup

    return _fitting(MpiGroup(timeout=timeout), rank, size, mpi.remedy())


def _others(choice: Choice, rank: int, size: int, timeout: float) -> Group:
    for point in choice.points:
        group = _made(point, rank, size, timeout)
        if group is not None:
            return _fitting(group, rank, size, f"See {point.value}, which made it.")
    raise BadInput(
        f"Rank {rank} of {size}: no group takes this job, though these are installed: "
        f"{', '.join(f'{point.name} ({point.value})' for point in choice.points)}. Start it with "
        f"`choros run -n {size} script.py`, or with the mpiexec or srun of an MPI."
    )


def _made(point: EntryPoint, rank: int, size: int, timeout: float) -> Group | None:
    try:
        make = point.load()
    except Exception as error:
        raise BadInput(
            f"The group {point.name!r} cannot be loaded from {point.value} ({type(error).__name__}: {error}): repair "
            "or uninstall the package, or name another group in CHOROS_GROUP."
        ) from error
    group: Group | None = make(rank, size, timeout)
    return group


def _fitting(group: Group, rank: int, size: int, remedy: str) -> Group:
    """Return the group, if it is what the launcher says."""
    found, place = (group.rank, group.size), (rank, size)
    if found == place:
        return group
    group.close()
    raise BadInput(
        f"Rank {rank} is one of {size}, says the launcher, but in its group it is rank {found[0]} of "
        f"{found[1]}: the ranks would train apart. {remedy}"
    )
