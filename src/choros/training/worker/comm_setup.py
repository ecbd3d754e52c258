"""The connections of a job's ranks, on one host or on several: group, center, control block and epoch log."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from choros.algorithms import Algorithm
from choros.cluster.hardware import usable_cores
from choros.cluster.hardware.network_address import own_address
from choros.comm.bootstrap.init import part
from choros.comm.bootstrap.select import MPI
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.offload.group import OffloadGroup
from choros.comm.p2p.group import MessageGroup
from choros.comm.p2p.interface import PointToPoint
from choros.comm.shared_values import gather_values
from choros.comm.shm.group import share
from choros.comm.shm.group_header import format_ranks
from choros.comm.shm.segment import Segment, align
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.auth_socket import RankGreeting
from choros.comm.tcp.reconnecting_client import ReconnectingClient
from choros.param_server.shard_service import reply_segment
from choros.param_server.sharded import ShardedParameterServer, statistics_of_shard
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.param_server.transfer_client import TransferClient
from choros.param_server.transfer_slots import TransferSlots, VectorRelay
from choros.training.async_control.best_member import BestMemberSlots
from choros.training.async_control.center_snapshots import CenterSnapshots, CenterSnapshotStore
from choros.training.async_control.control_block import ControlBlock
from choros.training.async_control.epoch_log import LINE, EpochLog
from choros.training.async_control.remote_control import RemoteControlBlock, RemoteEpochLog
from choros.training.async_control.shard_server import ControlConfig, ServerConfig, ShardServerProcess
from choros.training.executors.shared_weights import SharedWeights
from choros.training.payload import pack_algorithm
from choros.training.spec import FitConfig
from choros.training.worker.setup import create_exchange_segment, join_exchange
from choros.types import Array

logger = logging.getLogger(__name__)

_MIN_DIVIDED_BYTES = 1 << 20  # a smaller center is not divided among the hosts
_MIN_MESSAGE_BYTES = 1 << 16  # a smaller part of a host is sent with its header, not as a separate message


@dataclass
class CommHandles:
    """The connections of one rank to the others and to the driver.

    Attributes:
        group: Group. All ranks if synchronous, else a group of one rank.
        center: the parameter server, or None.
        control_block: ControlBlock or RemoteControlBlock.
        epoch_log: EpochLog or RemoteEpochLog, or None.
        weights: SharedWeights, in which the driver reads weights, or None.
        snapshots: the center at epochs' ends, or None.
        best: the best member of an Ensemble, or None.
        resources: further resources that ``close`` closes, in this order.
        server: ShardServerProcess of this host's part of the center, or None.
    """

    group: Group
    center: Any
    control_block: Any
    epoch_log: Any = None
    weights: SharedWeights | None = None
    snapshots: CenterSnapshotStore | None = None
    best: BestMemberSlots | None = None
    resources: list[Any] = field(default_factory=list)
    server: ShardServerProcess | None = None

    def close(self) -> None:
        """Close all connections. The server comes first: it must not be restarted after its memory is released."""
        for resource in (self.server, self.center, self.group, *self.resources):
            if resource is not None:
                resource.close()


def connect_ranks(
    base: Group, job: FitConfig, algorithm: Algorithm, nbytes: int, vectors: Callable[[], tuple[Array, Array]]
) -> CommHandles:
    """Connect the ranks of a job. Collective: every rank must call it.

    Args:
        base: Group. All ranks.
        job: FitConfig.
        algorithm: the bound algorithm.
        nbytes: int. Bytes of the trainable vector.
        vectors: returns the initial center, a flat float array, and the moving statistics, another one. It is called
            only if there is a center, because these copies take as much memory as the model.
    """
    hosts = hosts_of(base)
    if len(hosts) == 1 and (job.asynchronous or not isinstance(base, OffloadGroup)):
        return _connect_one_host(base, job, algorithm, nbytes, vectors)
    if not job.asynchronous:
        epochs = job.epochs - job.initial_epoch
        # A separate group: training sets its timeout to that of a step, and ``base`` keeps the longer one.
        group = part(base, range(base.size)) or base
        control_block = ControlBlock.create(job.workers, epochs, job.epoch_values)
        return CommHandles(group, None, control_block, resources=[control_block])
    message_group = base.control if isinstance(base, OffloadGroup) else base  # no vectors are summed here
    return _connect_hosts(message_group, job, algorithm, *vectors(), hosts)


def _connect_one_host(
    base: Group, job: FitConfig, algorithm: Algorithm, nbytes: int, vectors: Callable[[], tuple[Array, Array]]
) -> CommHandles:
    control_block, epoch_log = _control_segments(base, job, vectors)
    segment = None
    if job.workers > 1:
        lead = base.rank == 0
        segment = share(base, create_exchange_segment(job, algorithm, nbytes, vectors) if lead else None)
    group, center = join_exchange(job, algorithm, segment, base.rank)
    return CommHandles(
        group,
        center,
        control_block,
        epoch_log,
        snapshots=epoch_log.snapshots,
        resources=[epoch_log, control_block, segment],
    )


def _control_segments(
    host_group: Group, job: FitConfig, vectors: Callable[[], tuple[Array, Array]]
) -> tuple[ControlBlock, EpochLog]:
    """Return the control block and the epoch log, in memory that the ranks of one host share."""
    lead, sizes = host_group.rank == 0, (job.workers, job.epochs - job.initial_epoch, job.epoch_values)
    control_block = ControlBlock(share(host_group, ControlBlock.create(*sizes).segment if lead else None), *sizes)
    logs = share(host_group, Segment.create((sizes[1] + 1) * LINE, "choros-epoch-log") if lead else None)
    snapshots = None
    if job.asynchronous and job.watched:
        snapshots = CenterSnapshots(share(host_group, CenterSnapshots.create(*vectors()).segment if lead else None))
    return control_block, EpochLog(logs, control_block, snapshots)


def _control_config(job: FitConfig, epoch_log: EpochLog) -> ControlConfig:
    snapshots = epoch_log.snapshots
    return ControlConfig(
        epochs=job.epochs - job.initial_epoch,
        values=job.epoch_values,
        control_block=epoch_log.control_block.segment.fd,
        epoch_log=epoch_log.segment.fd,
        snapshots=snapshots.segment.fd if snapshots is not None else None,
    )


def shards(size: int, itemsize: int, hosts: int, elementwise: bool) -> list[slice]:
    """Return the parts of a center, one for each host in order.

    A small center has one part, on the first host. So has the center of a rule that is not elementwise.

    Example:
        >>> shards(1 << 20, 4, 2, True), shards(100, 4, 2, True)
        ([slice(0, 524288, None), slice(524288, 1048576, None)], [slice(0, 100, None)])
    """
    if not elementwise or size * itemsize < _MIN_DIVIDED_BYTES:
        return [slice(0, size)]
    shard_values = align(-(-size // hosts))
    return [slice(min(i * shard_values, size), min((i + 1) * shard_values, size)) for i in range(hosts)]


def _vector_messages(base: Group, nbytes: int) -> PointToPoint | None:
    """Return messages for the center's vectors if ``CHOROS_COMM=mpi`` requests them, else None. Collective.

    Args:
        base: Group. All ranks.
        nbytes: int. Bytes of a host's part; small parts are sent with their headers.
    """
    if not isinstance(base, MessageGroup) or base.transport != "MPI":
        return None
    requested = os.environ.get("CHOROS_COMM") == MPI and nbytes >= _MIN_MESSAGE_BYTES
    # Settings of the hosts may differ. All ranks must decide alike, because ``among`` is collective.
    settings = gather_values(base, [requested, base.concurrent])
    if not all(requested for requested, _ in settings):
        return None
    limited = [rank for rank, (_, concurrent) in enumerate(settings) if not concurrent]
    if not limited:
        return base.among(range(base.size))
    if base.rank == 0:
        logger.warning(
            f"The center's vectors are sent by TCP, not by MPI (CHOROS_COMM=mpi): {format_ranks(limited)} started MPI "
            "without MPI_THREAD_MULTIPLE. Let Choros start MPI, or leave mpi4py.rc.thread_level as it is."
        )
    return None


def _connect_hosts(
    base: Group, job: FitConfig, algorithm: Algorithm, trainable: Array, statistics: Array, hosts: list[list[int]]
) -> CommHandles:
    """Connect to a center on several hosts: each host holds a part, or the first host holds all of it."""
    host_number = next(i for i, ranks in enumerate(hosts) if base.rank in ranks)
    host_group = part(base, hosts[host_number])
    assert host_group is not None  # noqa: S101 - this rank is a member
    host_group.timeout = base.timeout
    resources: list[Any] = [host_group]
    slices = shards(trainable.size, trainable.itemsize, len(hosts), algorithm.elementwise)
    # Every rank draws a secret, and all use rank 0's.
    secret = bytes.fromhex(base.gather(secrets.token_hex(32).encode())[0].decode())
    control_block, epoch_log, center = None, None, None
    if host_number == 0:
        control_block, epoch_log = _control_segments(host_group, job, lambda: (trainable, statistics))
    messages = _vector_messages(base, trainable.nbytes // len(slices))
    if messages is not None:
        # Closed first, which ends the messages: ``close`` waits until the other ranks leave too.
        resources.insert(0, MessageGroup(messages, base.timeout))
    # The server is a child of the first rank and would inherit its cores, on which that rank computes.
    cores = {core for cores_of_rank in gather_values(host_group, usable_cores()) for core in cores_of_rank}
    server_address, server = "", None
    if host_number < len(slices):
        shard_slice = slices[host_number]
        # Moving statistics are small and not divided.
        shard_statistics = statistics_of_shard(host_number, statistics)
        created = None
        if host_group.rank == 0:
            vector = trainable[shard_slice]
            created = SharedMemoryParameterServer.create(
                vector, shard_statistics, algorithm.start(vector, job.workers), job.workers
            )
        segment = share(host_group, created)
        resources.append(segment)
        center = SharedMemoryParameterServer(segment, algorithm, base.rank, job.workers, timeout=job.timeout)
        code = pack_algorithm(algorithm)  # on each rank, so that all raise if it cannot be pickled
        if host_group.rank == 0:
            replies = reply_segment(center)
            resources.append(replies)
            transfers = None
            if messages is not None:
                transfers = TransferSlots.create(center)
                remote_ranks = set(range(base.size)) - set(hosts[host_number])
                relay = VectorRelay(TransferSlots(transfers, center), messages, replies, center, remote_ranks)
                resources = [relay, *resources, transfers]
            config = ServerConfig(
                algorithm=job.algorithm,
                algorithm_code=code.hex(),
                workers=job.workers,
                timeout=job.timeout,
                secret=secret.hex(),
                address=own_address(os.environ.get("CHOROS_NETWORK", "")),
                center=segment.fd,
                replies=replies.fd,
                transfers=transfers.fd if transfers is not None else None,
                control=_control_config(job, epoch_log) if epoch_log is not None else None,
                cores=sorted(cores),  # of this host's ranks
            )
            server = ShardServerProcess(config, base.rank)
            server_address = server.address
    addresses = gather_values(base, [server_address, os.uname().nodename])
    clients: dict[int, ReconnectingClient] = {}
    parts: list[tuple[slice, Any]] = []
    for i, shard_slice in enumerate(slices):
        if i == host_number:
            parts.append((shard_slice, center))
            continue
        leader = hosts[i][0]
        peer_address, host = addresses[leader]
        peer = f"The center's server on {host} (rank {leader})"
        clients[i] = ReconnectingClient(peer_address, secret, RankGreeting(base.rank), peer, job.timeout, base.timeout)
        size = shard_slice.stop - shard_slice.start
        parts.append(
            (
                shard_slice,
                TransferClient(clients[i], messages, leader, host, size, trainable.dtype) if messages else clients[i],
            )
        )
    sharded = ShardedParameterServer(algorithm, parts, messages.name if messages else "")
    control = control_block or RemoteControlBlock(clients[0])
    logs = epoch_log or RemoteEpochLog(clients[0], job.watched)
    resources = [logs, control, *resources]
    return CommHandles(
        SingleRankGroup(), sharded, control, logs, snapshots=logs.snapshots, resources=resources, server=server
    )
