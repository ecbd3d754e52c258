"""``centre_state`` of a center between hosts: rank 0 takes all parts, as whole vectors, and puts them back.

The parts are of one moment only if no worker is in an exchange meanwhile (``training/async_control/quiesce.py`` sees to
it). A state is the same however many hosts the centre was divided among.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.errors import PeerLostError
from choros.param_server import layout, snapshot
from choros.param_server.sharded import ShardedParameterServer
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array


def take(centre: ShardedParameterServer) -> tuple[Array, list[Array]]:
    """Return copies of the first part's header, and of all parts' vectors put together; rank 0 calls.

    Raises:
        PeerLostError: a worker was in an exchange.
    """
    for _, far in centre._far:
        far.line.tell({"op": "take"})
    found = {i: snapshot.take(near) for i, _, near in centre._near}
    for i, _, _, (header, *vectors) in centre._heard():
        found[i] = header.copy(), [vector.copy() for vector in vectors]
    (first, (_, others, *_)), count = found[0], len(found[0][1])
    if any(header[layout.CLOCK] != first[layout.CLOCK] for header, _ in found.values()):
        raise PeerLostError("The hosts' parts of the centre are not of one moment: a worker was in an exchange.")
    whole = [np.concatenate([found[i][1][each] for i in sorted(found)]) for each in range(count)]
    whole[1] = others
    return first, whole


def put(centre: ShardedParameterServer, header: Array, vectors: list[Array]) -> None:
    """Go on from what ``take`` gave, on so many hosts as there are now; rank 0 calls, before any worker exchanges."""
    vector, others, *memory = vectors
    for _, far in centre._far:
        far.line.tell({"op": "put"}, [header, vector[far.part], others[:0], *(each[far.part] for each in memory)])
    for i, part, near in centre._near:
        snapshot.put(near, header, [vector[part], others if i == 0 else others[:0], *(m[part] for m in memory)])
    centre._heard()


def begin_at(centre: ShardedParameterServer, epoch: int, batch: int) -> None:
    """Say of all workers, before they exchange, where they begin; rank 0 calls."""
    for _, _, near in centre._near:
        snapshot.begin_at(near, epoch, batch)


def place_of(centre: ShardedParameterServer, rank: int) -> tuple[int, int] | None:
    """Return where a worker was at its last exchange, as the first part knows."""
    for i, far in centre._far:
        if i == 0:
            return snapshot.place(int(far.line.ask({"op": "place", "rank": rank})[0]["word"]))
    return snapshot.place_of(centre._near[0][2], rank)


def look_again(centre: ShardedParameterServer) -> None:
    """Take up, as a worker that has yet to exchange, what was put into the centre after it had come."""
    for _, far in centre._far:
        far.line.tell({"op": "look again"})
    for _, _, near in centre._near:
        snapshot.look_again(near)
    for _, far, head, _ in centre._heard():
        far.sent, far.times_set = int(head["sent"]), int(head["set"])


def answer(
    centre: SharedMemoryParameterServer, head: dict[str, Any], arrays: list[Array]
) -> tuple[dict[str, Any], list[Array]] | None:
    """Answer one question of the functions above, by the host that has the part; None where it is none of theirs."""
    if head["op"] == "take":
        header, vectors = snapshot.take(centre)
        return {}, [header, *vectors]
    if head["op"] == "put":
        header, *vectors = arrays
        snapshot.put(centre, header, vectors)
        return {}, []
    if head["op"] == "place":
        found = snapshot.place_of(centre, int(head["rank"]))
        return {"word": 0 if found is None else snapshot.word(*found)}, []
    if head["op"] == "look again":
        snapshot.look_again(centre)
        return {"sent": centre._sent, "set": centre._set}, []
    return None
