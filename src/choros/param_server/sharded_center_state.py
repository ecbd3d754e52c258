"""Export and import of a sharded parameter server's state: rank 0 joins the shards to whole vectors, and divides them.

The shards' states belong together only if no worker is in an exchange meanwhile;
``training/async_control/pause.py`` ensures that. A state does not depend on the number of hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from choros.comm.messages import Done, ask
from choros.errors import PeerLostError
from choros.param_server import center_state, layout
from choros.param_server.messages import (
    CountersReply,
    ExportState,
    ReadWorkerPosition,
    RefreshCounters,
    ShardState,
    WorkerPosition,
)
from choros.param_server.sharded import ShardedParameterServer, statistics_of_shard
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array


def export_state(
    server: ShardedParameterServer, meanwhile: Callable[[], None] | None = None
) -> tuple[Array, list[Array]]:
    """Return copies of the first shard's header and of all vectors, joined over the shards. Rank 0 calls.

    ``meanwhile`` is called too: all workers pause, so none commits an exchange.

    Raises:
        PeerLostError: a worker was in an exchange, so the shards' clocks differ.
    """
    with server.no_reply_left(ShardState):
        for _, shard in server._remote_shards:
            shard.send(ExportState())
        states = {index: center_state.export_state(local) for index, _, local in server._local_shards}
    for index, _, reply in server.receive_all(ShardState):
        # Copies: a reply's arrays are valid only until the next request on its connection.
        states[index] = reply.header.copy(), [vector.copy() for vector in reply.vectors]
    (first_header, (_, statistics, *_)), count = states[0], len(states[0][1])
    if any(header[layout.CLOCK] != first_header[layout.CLOCK] for header, _ in states.values()):
        raise PeerLostError("The hosts' parts of the center have different clocks: a worker was in an exchange.")
    if meanwhile is not None:
        meanwhile()
    joined_vectors = [np.concatenate([states[index][1][number] for index in sorted(states)]) for number in range(count)]
    joined_vectors[1] = statistics  # the first shard has all moving statistics
    return first_header, joined_vectors


def import_state(server: ShardedParameterServer, header: Array, vectors: list[Array]) -> None:
    """Restore the result of ``export_state``, on any number of hosts. Rank 0 calls, before any worker exchanges."""
    vector, statistics, *memory = vectors
    with server.no_reply_left(Done):
        for _, shard in server._remote_shards:
            shard.send(
                ShardState(
                    header,
                    [vector[shard.part], statistics[:0], *(memory_vector[shard.part] for memory_vector in memory)],
                )
            )
        for index, part, local in server._local_shards:
            shard_statistics = statistics_of_shard(index, statistics)
            center_state.import_state(
                local, header, [vector[part], shard_statistics, *(memory_vector[part] for memory_vector in memory)]
            )
    server.receive_all(Done)


def set_positions(server: ShardedParameterServer, epoch: int, batch: int) -> None:
    """Set the start position of all workers. Rank 0 calls, before any worker exchanges.

    Only the first shard's positions are read, and rank 0's host has this shard.
    """
    for _, _, local in server._local_shards:
        center_state.set_positions(local, epoch, batch)


def position_of(server: ShardedParameterServer, rank: int) -> tuple[int, int] | None:
    """Return a worker's position (epoch, batch) at its last exchange, from the first shard; None if it had none."""
    for index, shard in server._remote_shards:
        if index == 0:
            return ask(shard.connection, ReadWorkerPosition(rank), WorkerPosition).position
    return center_state.position_of(server._local_shards[0][2], rank)


def refresh(server: ShardedParameterServer) -> None:
    """Read the counters again, in a worker before its first exchange, after ``import_state`` by rank 0."""
    with server.no_reply_left(CountersReply):
        for _, shard in server._remote_shards:
            shard.send(RefreshCounters())
        for _, _, local in server._local_shards:
            center_state.refresh(local)
    for _, shard, reply in server.receive_all(CountersReply):
        shard.contributions, shard.times_set = reply.contributions, reply.times_set


def reply(shard: SharedMemoryParameterServer, request: Any) -> object:
    """Serve one of ``STATE_REQUESTS``, on the host of the shard; return the reply."""
    match request:
        case ExportState():
            return ShardState(*center_state.export_state(shard))
        case ShardState(header, vectors):
            center_state.import_state(shard, header, vectors)
            return Done()
        case ReadWorkerPosition(rank):
            return WorkerPosition(center_state.position_of(shard, rank))
        case RefreshCounters():
            center_state.refresh(shard)
            return CountersReply(shard._contributions, shard._times_set)
    raise AssertionError(f"no reply to {type(request).__name__}")
