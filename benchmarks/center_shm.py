"""One exchange with a center in shared memory, as a multiple of one memcpy of the same vector in the same run.

With one client and with two that contend (each pinned to one core, one thread), for the elastic rule and for
DOWNPOUR's. Rounds of a copy by one client alone and of exchanges are interleaved; the contended figure is the time
until every client has made its exchange, divided by the clients. Prints JSON.

    python benchmarks/center_shm.py --sizes 1000000 25000000
"""

import argparse
import json
import statistics
import time

import numpy as np
from common import pin, ranks

from choros.comm.shm.group import SharedGroup
from choros.comm.shm.segment import Segment
from choros.param_server.shared_memory import SharedMemoryParameterServer

NONE = np.zeros(0, "float32")


class Elastic:
    """Asynchronous EASGD (Zhang et al. 2015, algorithm 1)."""

    shows, elementwise, uses_seen = "before", True, False

    def propose(self, local, seen, window):
        return local

    def merge(self, center, message, info, memory):
        return center + 0.3 * (message - center), memory

    def adopt(self, local, shown):
        return local - 0.3 * (local - shown)


class Downpour:
    """DOWNPOUR (Dean et al. 2012)."""

    shows, elementwise = "after", True

    def propose(self, local, seen, window):
        return local - seen

    def merge(self, center, message, info, memory):
        return center + message, memory

    def adopt(self, local, shown):
        return shown


def client_main(fds: str, rank: int, count: int, rounds: int) -> None:
    pin(rank)
    group_segment, *centers = [Segment.attach(int(fd)) for fd in fds.split(",")]
    group = SharedGroup(group_segment, rank, timeout=120)
    clients = [
        SharedMemoryParameterServer(segment, rule, rank, group.size, timeout=120)
        for segment, rule in zip(centers, (Elastic(), Downpour()), strict=True)
    ]
    local = np.random.default_rng(rank).random(count, dtype="float32")
    seen, source, target = local.copy(), local.copy(), local.copy()
    taken: dict[str, list[float]] = {}

    def timed(name: str, call, alone: bool = False) -> None:
        group.barrier()
        begin = time.perf_counter()
        if not alone or rank == 0:
            call()
        if not alone:
            group.barrier()
        taken.setdefault(name, []).append((time.perf_counter() - begin) / (1 if alone else group.size))
        group.barrier()

    for _ in range(rounds):
        for client, name in zip(clients, ("elastic", "downpour"), strict=True):
            timed("memcpy", lambda: np.copyto(target, source), alone=True)
            timed(f"{name}_1_client", lambda client=client: client.exchange(local, seen, 1, NONE), alone=True)
            timed(f"{name}_{group.size}_clients", lambda client=client: client.exchange(local, seen, 1, NONE))
        timed("read", lambda: clients[0].read(target, NONE), alone=True)
    if rank == 0:
        medians = {name: statistics.median(times) for name, times in taken.items()}
        result = {
            "count": count,
            "clients": group.size,
            "rounds": rounds,
            "microseconds": {name: round(1e6 * value, 1) for name, value in medians.items()},
            "memcpys": {name: round(value / medians["memcpy"], 2) for name, value in medians.items()},
        }
        print(json.dumps(result), flush=True)
    group.barrier()
    for part in (group, *clients):
        part.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[380_000, 1_000_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=0, help="0: by size")
    parser.add_argument("--child", nargs=4, metavar=("FDS", "RANK", "COUNT", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        client_main(options.child[0], *map(int, options.child[1:]))
        return
    results = []
    for count in options.sizes:
        rounds = options.rounds or max(11, min(300, 60_000_000 // count))
        start = np.zeros(count, "float32")
        segments = [SharedGroup.create(options.clients, 1 << 16)]
        segments += [SharedMemoryParameterServer.create(start, NONE, (), options.clients) for _ in range(2)]
        fds = [segment.fd for segment in segments]
        command = ["--child", ",".join(map(str, fds))]
        results.append(ranks([[*command, rank, count, rounds] for rank in range(options.clients)], fds))
        for segment in segments:
            segment.close()
    print(json.dumps({"benchmark": "center_shm", "results": results}, indent=1))


if __name__ == "__main__":
    main()
