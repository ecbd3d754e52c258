"""Creation of the job's process group: one group for each process, used by everything in a script."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from typing import TypeVar

from choros.cluster import Place
from choros.cluster.hardware import MPICH_UNDER_PMI2, raise_descriptors
from choros.cluster.hardware.network_address import LOOPBACK, address_of, host_and_port, own_address, pass_on
from choros.comm.bootstrap.device_check import check_gpus_apart
from choros.comm.bootstrap.exit_hooks import delay_secondary_failure, let_root_cause_exit_first
from choros.comm.bootstrap.offload import with_offload
from choros.comm.bootstrap.select import BUILT_IN, MPI, SHARED, TCP, Choice, choose
from choros.comm.group import Group, abort_waits
from choros.comm.hierarchical_group import HierarchicalGroup, hosts_of, is_hierarchical
from choros.comm.offload.group import OffloadGroup, as_control_group
from choros.comm.p2p.group import MessageGroup
from choros.comm.shm.group import SharedGroup, share
from choros.comm.tcp.group import TcpGroup
from choros.errors import InvalidInputError

_GroupT = TypeVar("_GroupT", bound=Group)
_joined: dict[str, Group] = {}
_MIN_SECRET_BYTES = 16
ELASTIC = "CHOROS_ELASTIC"  # set for the ranks of an elastic job: the address of the job's control server
_MANY_RANKS = 128  # each rank may have a socket to every other rank, and the usual limit is 1,024 descriptors
_LAUNCHERS_THAT_END_RANKS = ("choros", "torchrun")  # launchers that end the other ranks after a failure


def join(rank: int, size: int, timeout: float) -> Group:
    """Return the group of this job's ranks; every call in a process returns the same group.

    ``choros.comm.bootstrap.select`` chooses its kind.

    Args:
        rank: int. This process's rank, from its launcher.
        size: int. Number of ranks, from the launcher.
        timeout: float. Seconds that the ranks wait for each other.

    Raises:
        InvalidInputError: no kind of group applies, the group has another size or order than the launcher reported, or
            several ranks use one GPU.
    """
    if "group" not in _joined:
        place = Place.here()
        if os.environ.get(ELASTIC):
            raise InvalidInputError(
                f"Process {os.getpid()} belongs to an elastic job, whose ranks connect in hvd.init(): call that first, "
                "and train with hvd.DistributedOptimizer."
            )
        choice = choose(place)
        if size > _MANY_RANKS:
            raise_descriptors()
        # ``setdefault``: a value that the user has set for a library has priority.
        for name, value in pass_on(os.environ.get("CHOROS_NETWORK", "")).items():
            os.environ.setdefault(name, value)
        if choice.kind == MPI:
            group = _join_by_mpi(rank, size, timeout)
        elif choice.kind == TCP:
            group = _join_by_tcp(place, rank, size, timeout)
        elif choice.kind == SHARED:
            group = _join_shared_memory(rank, size, timeout)
        else:
            group = _join_by_entry_point(choice, rank, size, timeout)
        _joined["control"] = group  # ``leave`` must close it even if a step below fails
        check_gpus_apart(group)
        _joined["group"] = (
            group if os.environ.get("CHOROS_COMM") in BUILT_IN else with_offload(group, choice.offload, timeout)
        )
    return _joined["group"]


def join_by_sockets(
    rank: int, size: int, exchange: Callable[[bytes], list[bytes]], secret: bytes, address: str, timeout: float
) -> Group:
    """Leave the present group and return a new group over TCP; ``join`` returns it from now on.

    Args:
        rank: int. This process's rank.
        size: int. Number of ranks.
        exchange: receives this rank's bytes and returns all ranks' bytes, in the order of the ranks; called once.
        secret: bytes. The job's secret.
        address: str. Address of this host for the other ranks; "" for the network of ``CHOROS_NETWORK``.
        timeout: float. Seconds that the ranks wait for each other.
    """
    leave()
    address = address or own_address(os.environ.get("CHOROS_NETWORK", ""))
    _joined["group"] = _prefer_shared_memory(TcpGroup(rank, size, exchange, secret, address, timeout))
    return _joined["group"]


def give_up(reason: str) -> None:
    """Abort: this rank's waits in the group of ``join``, now or later, raise ``PeerLostError``; any thread may call."""
    # A copy of the list: another thread may join or leave meanwhile.
    for group in list(_joined.values()):
        abort_waits(group, reason)


def leave() -> None:
    """Leave the job's groups. The process may join another job afterwards."""
    # In reverse order of the joins: a group may use one that was joined before it.
    for group in dict.fromkeys(reversed(_joined.values())):
        group.close()
    _joined.clear()


def part(group: Group, ranks: Sequence[int]) -> Group | None:
    """Return a group of some of the ranks, and None on the others. All ranks of ``group`` call.

    Args:
        group: Group. All ranks. If it has no method ``part``, the new group uses shared memory.
        ranks: sequence of int. The members, in this order.

    Raises:
        InvalidInputError: the group has no method ``part``, and its ranks are on several machines.
    """
    if isinstance(group, OffloadGroup):
        control = part(group.control, ranks)
        return control and OffloadGroup(as_control_group(control), group.backend.among(ranks))
    is_member, part_method = group.rank in ranks, getattr(group, "part", None)
    if part_method is not None:
        subgroup: Group | None = part_method(ranks) if is_member else None
        return subgroup
    return _make_shared_group(group, list(ranks))


def in_shared_memory(group: Group) -> Group:
    """Return a shared-memory group of the same ranks. All ranks call.

    Args:
        group: Group. All ranks, on one machine.

    Raises:
        InvalidInputError: the ranks are on several machines.
    """
    shared = _make_shared_group(group, list(range(group.size)))
    assert shared is not None  # noqa: S101 - every rank is a member
    return shared


def _make_shared_group(group: Group, ranks: list[int]) -> Group | None:
    new_segment = SharedGroup.create(len(ranks)) if group.rank == ranks[0] else None
    segment = share(group, new_segment, ranks[0])
    try:
        if group.rank not in ranks:
            return None
        # A second descriptor, which the group owns. ``close`` of the first keeps both open until the group closes, as
        # the close of any descriptor would drop the record locks.
        return SharedGroup(os.dup(segment.fd), ranks.index(group.rank), timeout=group.timeout)
    finally:
        segment.close()


def _join_shared_memory(rank: int, size: int, timeout: float) -> Group:
    descriptor = os.environ.get("CHOROS_COMM_FD")
    if descriptor:
        delay_secondary_failure()
        group = SharedGroup(int(descriptor), rank, timeout=timeout)
        return _check_size(group, rank, size, f"Start them with `choros run -n {size} script.py`.")
    _joined["mpi"] = _join_by_mpi(rank, size, timeout)
    return in_shared_memory(_joined["mpi"])


def _join_by_mpi(rank: int, size: int, timeout: float) -> Group:
    from choros.comm.p2p import mpi_runtime
    from choros.comm.p2p.mpi_group import MpiGroup

    if Place.here().launcher == "slurm":
        for name, value in MPICH_UNDER_PMI2.items():
            os.environ.setdefault(name, value)
    return _prefer_hierarchical(_check_size(MpiGroup(timeout=timeout), rank, size, mpi_runtime.remedy()))


def _join_by_tcp(place: Place, rank: int, size: int, timeout: float) -> Group:
    let_root_cause_exit_first(f"rank {rank} of {size} on {os.uname().nodename}")
    if place.launcher == "torchrun":
        from choros.comm.bootstrap.torch import join_store

        secret, exchange = join_store(rank, size, timeout)
    else:
        secret, exchange = _exchange_by_secret(place, rank, size, timeout)
    tcp_group = TcpGroup(rank, size, exchange, secret, own_address(os.environ.get("CHOROS_NETWORK", "")), timeout)
    # Under other launchers (ssh in a loop, Kubernetes) no process would end a rank that is inside a framework's call.
    if place.launcher not in _LAUNCHERS_THAT_END_RANKS:
        tcp_group.end_together()
    return _prefer_shared_memory(tcp_group)


def _prefer_shared_memory(tcp_group: TcpGroup) -> Group:
    """Return a shared-memory group if all ranks are on one host, else the TCP group, hierarchical if that is faster."""
    if tcp_group.size > 1 and len(hosts_of(tcp_group)) == 1 and os.environ.get("CHOROS_COMM") != TCP:
        _joined["tcp"] = tcp_group
        return in_shared_memory(tcp_group)
    return _prefer_hierarchical(tcp_group)


def _exchange_by_secret(
    place: Place, rank: int, size: int, timeout: float
) -> tuple[bytes, Callable[[bytes], list[bytes]]]:
    """Return the secret and the exchange of bytes: at the server of ``CHOROS_MEETING``, else at rank 0's host."""
    from choros.comm.bootstrap.rendezvous import join_rendezvous, ports

    try:
        secret = bytes.fromhex(os.environ.get("CHOROS_SECRET", ""))
    except ValueError:
        secret = b""
    # An HMAC with a short key could be found by trying keys against one recorded handshake.
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidInputError(
            "To connect by TCP all ranks need the same CHOROS_SECRET of 64 random hexadecimal digits "
            "(openssl rand -hex 32). Keep it secret."
        )
    variable = os.environ.get("CHOROS_COORDINATOR", "")
    rendezvous = os.environ.get("CHOROS_MEETING", "")
    coordinator = variable or place.coordinator or (*place.hosts, "")[0]
    if not rendezvous and not coordinator:
        raise InvalidInputError(
            f"{place.launcher} does not report the hosts of this job: set CHOROS_COORDINATOR to rank 0's host on all "
            "ranks."
        )
    if not rendezvous:
        host, port = host_and_port(coordinator)
        if ":" in host:
            raise InvalidInputError(
                f"The ranks cannot connect to {coordinator}: Choros' sockets use IPv4. Set CHOROS_COORDINATOR on all "
                "ranks to an IPv4 address of rank 0's host, or to a name that resolves to one."
            )
        candidate_ports = [port] if port else ports(secret)
        rendezvous = f"{host}:{','.join(map(str, candidate_ports))}"
        if not rank:
            return secret, partial(_serve_rendezvous, secret, address_of(host), candidate_ports, size, timeout)
    return secret, join_rendezvous(rendezvous, secret, rank, timeout)


def _serve_rendezvous(
    secret: bytes, address: str, candidate_ports: Sequence[int], size: int, timeout: float, data: bytes
) -> list[bytes]:
    """Serve the rendezvous as rank 0, and take part in it."""
    from choros.comm.bootstrap.rendezvous import (
        Rendezvous,
        RendezvousGreeting,
        join_rendezvous,
        refuse_second_rank_zero,
    )
    from choros.comm.tcp.auth_socket import AuthListener

    with AuthListener(address, secret, RendezvousGreeting, candidate_ports) as listener:
        refuse_second_rank_zero(listener, candidate_ports)
        Rendezvous(listener, size)
        return join_rendezvous(f"{address or LOOPBACK}:{listener.address.rpartition(':')[2]}", secret, 0, timeout)(data)


def _prefer_hierarchical(group: MessageGroup) -> Group:
    """Return a hierarchical group on top of the group if that saves network traffic, else the group itself."""
    if os.environ.get("CHOROS_COMM") != MPI and is_hierarchical(hosts_of(group)):
        return HierarchicalGroup(group, close_base=True)
    return group


def _join_by_entry_point(choice: Choice, rank: int, size: int, timeout: float) -> Group:
    for point in choice.points:
        group = _load_group(point, rank, size, timeout)
        if group is not None:
            return _check_size(group, rank, size, f"See {point.value}, which made it.")
    raise InvalidInputError(
        f"Rank {rank} of {size}: no group takes this job, though these are installed: "
        f"{', '.join(f'{point.name} ({point.value})' for point in choice.points)}. Start it with "
        f"`choros run -n {size} script.py`, or with the mpiexec or srun of an MPI."
    )


def _load_group(point: EntryPoint, rank: int, size: int, timeout: float) -> Group | None:
    try:
        factory = point.load()
    except Exception as error:
        raise InvalidInputError(
            f"The group {point.name!r} cannot be loaded from {point.value} ({type(error).__name__}: {error}): repair "
            "or uninstall the package, or name another group in CHOROS_COMM."
        ) from error
    group: Group | None = factory(rank, size, timeout)
    return group


def _check_size(group: _GroupT, rank: int, size: int, remedy: str) -> _GroupT:
    """Return the group if its rank and size are those of the launcher."""
    actual, expected = (group.rank, group.size), (rank, size)
    if actual == expected:
        return group
    # Closed before the error: its ranks must learn at once that this rank does not take part.
    group.close()
    raise InvalidInputError(
        f"Rank {rank} is one of {size}, says the launcher, but in its group it is rank {actual[0]} of "
        f"{actual[1]}: the ranks would train separate models. {remedy}"
    )
