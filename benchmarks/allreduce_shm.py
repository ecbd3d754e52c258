"""All-reduce in shared memory, as a multiple of one memcpy of the same vector in the same run.

Two ranks (``--ranks``), each pinned to one core with one thread. In every round, in turn: a copy of the vector by
one rank alone (the baseline), a sum of values that are already in the slots, and a sum of an array from and to
private memory. Medians over the rounds, of the slowest rank. Prints JSON.

    python benchmarks/allreduce_shm.py --sizes 2560 380000 1000000 25000000
"""

import argparse
import json
import statistics
import time

import numpy as np
from common import pin, ranks

from choros.comm.shm.group import SharedGroup
from choros.comm.shm.segment import Segment


def rank_main(fd: int, rank: int, count: int, rounds: int, spin: float) -> None:
    pin(rank)
    group = SharedGroup(Segment.attach(fd), rank, timeout=120, spin=spin)
    rng = np.random.default_rng(rank)
    slot = group.slot(count, "float32")
    slot[:] = rng.random(count, dtype="float32")
    source, target = slot.copy(), np.ones(count, "float32")
    taken: dict[str, list[float]] = {}

    def timed(name: str, call, alone: bool = False) -> None:
        group.barrier()
        begin = time.perf_counter()
        if not alone or rank == 0:
            call()
        taken.setdefault(name, []).append(time.perf_counter() - begin)

    share = slice(rank * count // group.size, (rank + 1) * count // group.size)
    slots = [group._segment.array("float32", count, group._slot_offset(r)) for r in range(group.size)]

    def floor() -> None:
        """Calculate the least that a sum must do: this rank's share, without a barrier."""
        np.add(slots[0][share], slots[1][share], out=target[share])

    for _ in range(rounds):
        timed("memcpy", lambda: np.copyto(target, source), alone=True)
        timed("memcpy_all_ranks", lambda: np.copyto(target, source))
        timed("barrier", group.barrier)
        timed("write_slot", lambda: np.copyto(slot, source))
        if group.size > 1:
            timed("floor", floor)
        timed("write_slot_again", lambda: np.copyto(slot, source))
        timed("sum_slots", lambda: group.sum_slots(count, "float32"))
        timed("sum", lambda: group.sum(source))
    gathered = [json.loads(text) for text in group.gather(json.dumps(taken).encode())]
    if rank == 0:
        medians = {
            name: statistics.median(map(max, zip(*[item[name] for item in gathered], strict=True))) for name in taken
        }
        medians["memcpy"] = statistics.median(gathered[0]["memcpy"])
        base = medians["memcpy"]
        result = {
            "count": count,
            "ranks": group.size,
            "rounds": rounds,
            "microseconds": {name: round(1e6 * value, 1) for name, value in medians.items()},
            "memcpys": {name: round(value / base, 2) for name, value in medians.items()},
        }
        if group.size > 1:
            result["latency_over_floor_ms"] = round(1e3 * (medians["sum_slots"] - medians["floor"]), 4)
        print(json.dumps(result), flush=True)
    group.barrier()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2560, 380_000, 1_000_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=0, help="0: by size")
    parser.add_argument("--spin", type=float, default=50e-6)
    parser.add_argument("--child", type=int, nargs=4, metavar=("FD", "RANK", "COUNT", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        rank_main(*options.child, options.spin)
        return
    results = []
    for count in options.sizes:
        rounds = options.rounds or max(15, min(2000, 200_000_000 // count))
        with SharedGroup.create(options.ranks, 4 * count) as segment:
            command = ["--spin", options.spin, "--child", segment.fd]
            results.append(ranks([[*command, rank, count, rounds] for rank in range(options.ranks)], [segment.fd]))
    print(json.dumps({"benchmark": "allreduce_shm", "spin": options.spin, "results": results}, indent=1))


if __name__ == "__main__":
    main()
