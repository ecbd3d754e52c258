"""The group of a job's ranks: one a process, shared by all that meets in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

from choros.cluster import Place
from choros.cluster.hardware import MPICH_UNDER_PMI2, raise_descriptors
from choros.cluster.hardware.network_address import LOOPBACK, address_of, host_and_port, own_address, pass_on
from choros.comm.bootstrap.device_check import check_gpus_apart
from choros.comm.bootstrap.exit_hooks import let_the_cause_end_first, linger
from choros.comm.bootstrap.offload import summed
from choros.comm.bootstrap.select import MPI, NAMED, SHARED, TCP, Choice, choose
from choros.comm.group import Group
from choros.comm.hierarchical_group import HierarchicalGroup, hosts_of, worth_it
from choros.comm.offload.group import OffloadGroup, wide_of
from choros.comm.shm.group import SharedGroup, share
from choros.comm.tcp.group import TcpGroup
from choros.errors import InvalidInputError

_joined: dict[str, Group] = {}
_SECRET = 16  # bytes, at least
ELASTIC = "CHOROS_ELASTIC"  # tells a rank of a job whose ranks come and go where it asks for its place
_MANY = 128  # ranks: each may have a line to every other one, and the usual limit is 1,024 descriptors
_ENDING = ("choros", "torchrun")  # launchers that end the others of a rank that fails


def join(rank: int, size: int, timeout: float) -> Group:
    """Return the group of this job's ranks; the same one for everything in a script.

    See ``choros.comm.bootstrap.select`` for which it is.

    Args:
        rank: int. This process, as its launcher says.
        size: int. All ranks, as the launcher says.
        timeout: float. Seconds that the ranks wait for each other.

    Raises:
        InvalidInputError: there is nothing to meet in, a group of another size or order than the launcher says, or
            ranks that
            compute on one GPU.
    """
    if "group" not in _joined:
        place = Place.here()
        if os.environ.get(ELASTIC):
            raise InvalidInputError(
                f"Process {os.getpid()} is of an elastic job, whose ranks meet in hvd.init(): call that first, and "
                "train with hvd.DistributedOptimizer."
            )
        choice = choose(place)
        if size > _MANY:
            raise_descriptors()
        for name, value in pass_on(os.environ.get("CHOROS_NETWORK", "")).items():
            os.environ.setdefault(name, value)
        if choice.kind == MPI:
            group = _by_mpi(rank, size, timeout)
        elif choice.kind == TCP:
            group = _by_tcp(place, rank, size, timeout)
        elif choice.kind == SHARED:
            group = _shared(rank, size, timeout)
        else:
            group = _others(choice, rank, size, timeout)
        _joined["beneath"] = group  # which is not joined a second time where what comes now fails
        check_gpus_apart(group)
        _joined["group"] = group if os.environ.get("CHOROS_COMM") in NAMED else summed(group, choice.sums, timeout)
    return _joined["group"]


def join_by_sockets(
    rank: int, size: int, swap: Callable[[bytes], list[bytes]], secret: bytes, address: str, timeout: float
) -> Group:
    """Return the group of a job's ranks that know a way to tell each other one thing, and from now on that of ``join``.

    Args:
        rank: int. This process.
        size: int. All ranks.
        swap: gives each rank's bytes to all, in the order of the ranks; called once.
        secret: bytes. What only this job's ranks know.
        address: str. Where the others reach this host; "": as ``CHOROS_NETWORK`` says.
        timeout: float. Seconds that the ranks wait for each other.
    """
    leave()
    address = address or own_address(os.environ.get("CHOROS_NETWORK", ""))
    _joined["group"] = _nearest(TcpGroup(rank, size, swap, secret, address, timeout))
    return _joined["group"]


def give_up(reason: str) -> None:
    """Have this rank's waits in the group of ``join``, now or later, raise ``PeerLostError``; any thread may call."""
    for group in list(_joined.values()):
        if hasattr(group, "give_up"):
            group.give_up(reason)


def leave() -> None:
    """Leave the job, in a process that may be a rank of another one afterwards."""
    for group in dict.fromkeys(reversed(_joined.values())):
        group.close()
    _joined.clear()


def part(group: Group, ranks: Sequence[int]) -> Group | None:
    """Return the group of some of the ranks, None on the others; all of them call.

    Args:
        group: all ranks. Where it has no ``part`` of its own, the ranks share memory.
        ranks: who is in it, in this order.

    Raises:
        InvalidInputError: ranks of several machines, and the group has no ``part``.
    """
    if isinstance(group, OffloadGroup):
        beneath = part(group.wide, ranks)
        return beneath and OffloadGroup(wide_of(beneath), group.carrier.among(ranks))
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
        InvalidInputError: ranks of several machines.
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
    descriptor = os.environ.get("CHOROS_COMM_FD")
    if descriptor:
        linger()
        group = SharedGroup(int(descriptor), rank, timeout=timeout)
        return _fitting(group, rank, size, f"Start them with `choros run -n {size} script.py`.")
    _joined["mpi"] = _by_mpi(rank, size, timeout)
    return in_shared_memory(_joined["mpi"])


def _by_mpi(rank: int, size: int, timeout: float) -> Group:
    from choros.comm.p2p import mpi_runtime
    from choros.comm.p2p.mpi_group import MpiGroup

    if Place.here().launcher == "slurm":
        for name, value in MPICH_UNDER_PMI2.items():
            os.environ.setdefault(name, value)
    return _several(_fitting(MpiGroup(timeout=timeout), rank, size, mpi_runtime.remedy()))


def _by_tcp(place: Place, rank: int, size: int, timeout: float) -> Group:
    let_the_cause_end_first(f"rank {rank} of {size} on {os.uname().nodename}")
    if place.launcher == "torchrun":
        from choros.comm.bootstrap.torch import come

        secret, swap = come(rank, size, timeout)
    else:
        secret, swap = _by_secret(place, rank, size, timeout)
    wide = TcpGroup(rank, size, swap, secret, own_address(os.environ.get("CHOROS_NETWORK", "")), timeout)
    if place.launcher not in _ENDING:
        wide.end_together()
    return _nearest(wide)


def _nearest(wide: TcpGroup) -> Group:
    """Return the group of the same ranks that meets in shared memory, where all are on one host or some share one."""
    if wide.size > 1 and len(hosts_of(wide)) == 1 and os.environ.get("CHOROS_COMM") != TCP:
        _joined["tcp"] = wide
        return in_shared_memory(wide)
    return _several(wide)


def _by_secret(place: Place, rank: int, size: int, timeout: float) -> tuple[bytes, Callable[[bytes], list[bytes]]]:
    """Meet where ``CHOROS_MEETING`` says that somebody waits, else at rank 0's."""
    from choros.comm.bootstrap.rendezvous import come, ports

    try:
        secret = bytes.fromhex(os.environ.get("CHOROS_SECRET", ""))
    except ValueError:
        secret = b""
    if len(secret) < _SECRET:
        raise InvalidInputError(
            "To meet by sockets all ranks need the same CHOROS_SECRET of 64 random hexadecimal digits "
            "(openssl rand -hex 32), and nobody else may know it."
        )
    told = os.environ.get("CHOROS_COORDINATOR", "")
    meeting, coordinator = os.environ.get("CHOROS_MEETING", ""), told or place.coordinator or (*place.hosts, "")[0]
    if not meeting and not coordinator:
        raise InvalidInputError(
            f"{place.launcher} does not tell the hosts of this job: set CHOROS_COORDINATOR to rank 0's host on all "
            "ranks."
        )
    if not meeting:
        host, port = host_and_port(coordinator)
        if ":" in host:
            raise InvalidInputError(
                f"The ranks cannot meet at {coordinator}: Choros' sockets use IPv4. Set CHOROS_COORDINATOR on all "
                "ranks to an IPv4 address of rank 0's host, or to a name that leads to one."
            )
        among = [port] if port else ports(secret)
        meeting = f"{host}:{','.join(map(str, among))}"
        if not rank:
            return secret, partial(_hold, secret, address_of(host), among, size, timeout)
    return secret, come(meeting, secret, rank, timeout)


def _hold(secret: bytes, at: str, among: Sequence[int], size: int, timeout: float, mine: bytes) -> list[bytes]:
    """Hold the meeting, as rank 0, and come to it."""
    from choros.comm.bootstrap.rendezvous import Rendezvous, alone, come
    from choros.comm.tcp.auth_socket import AuthListener

    with AuthListener(at, secret, among) as door:
        alone(door, among)
        Rendezvous(door, size)
        return come(f"{at or LOOPBACK}:{door.place.rpartition(':')[2]}", secret, 0, timeout)(mine)


def _several(group: Any) -> Group:
    """Return the group in which ranks of several hosts add up in each host first, where that is worth it."""
    if os.environ.get("CHOROS_COMM") != MPI and worth_it(hosts_of(group)):
        group = HierarchicalGroup(group, own=True)
    found: Group = group
    return found


def _others(choice: Choice, rank: int, size: int, timeout: float) -> Group:
    for point in choice.points:
        group = _made(point, rank, size, timeout)
        if group is not None:
            return _fitting(group, rank, size, f"See {point.value}, which made it.")
    raise InvalidInputError(
        f"Rank {rank} of {size}: no group takes this job, though these are installed: "
        f"{', '.join(f'{point.name} ({point.value})' for point in choice.points)}. Start it with "
        f"`choros run -n {size} script.py`, or with the mpiexec or srun of an MPI."
    )


def _made(point: EntryPoint, rank: int, size: int, timeout: float) -> Group | None:
    try:
        make = point.load()
    except Exception as error:
        raise InvalidInputError(
            f"The group {point.name!r} cannot be loaded from {point.value} ({type(error).__name__}: {error}): repair "
            "or uninstall the package, or name another group in CHOROS_COMM."
        ) from error
    group: Group | None = make(rank, size, timeout)
    return group


def _fitting(group: Group, rank: int, size: int, remedy: str) -> Group:
    """Return the group, if it is what the launcher says."""
    found, place = (group.rank, group.size), (rank, size)
    if found == place:
        return group
    group.close()
    raise InvalidInputError(
        f"Rank {rank} is one of {size}, says the launcher, but in its group it is rank {found[0]} of "
        f"{found[1]}: the ranks would train apart. {remedy}"
    )
