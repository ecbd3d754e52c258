"""A sum between ranks of this machine, by each group, as a multiple of PyTorch's own ``all_reduce`` in the same run.

Each group has a job of its own (``choros run``), in which its sums and those of a bare ``torch.distributed`` process
group (gloo) take turns on vectors of the same length; prints one line of JSON for each group and length. With
``--nccl`` the bare group is NCCL's, for a machine on which each rank has a GPU.

    python benchmarks/native_groups.py --ranks 2 --counts 1000000 25000000
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

KINDS = ("shared", "torch", "jax")


def measure(counts: list[int], rounds: int, nccl: bool) -> None:
    """As one rank: time both, the slowest rank's time of each round."""
    import numpy as np

    from choros.cluster import Place
    from choros.comm.bootstrap.init import join
    from choros.comm.group import kind_of

    place = Place.here()
    group = join(place.rank, place.size, 60.0)

    import torch
    from torch import distributed

    distributed.init_process_group(
        "nccl" if nccl else "gloo", init_method=os.environ["BARE_AT"], rank=place.rank, world_size=place.size
    )
    for count in counts:
        times: dict[str, list[float]] = {"bare": [], "group": []}
        tensor = torch.ones(count, device="cuda" if nccl else "cpu")
        for _ in range(rounds + 2):
            group.slot(count, "float32")[:] = 1.0
            tensor.fill_(1.0)
            for name in times:
                group.barrier()
                begin = time.perf_counter()
                if name == "bare":
                    distributed.all_reduce(tensor)
                    result = float(tensor[-1])  # which waits for a GPU
                else:
                    result = float(group.sum_slots(count, np.float32)[-1])
                took = time.perf_counter() - begin
                if result != place.size:
                    raise ArithmeticError(f"{name} sums to {result}")
                times[name].append(max(json.loads(text) for text in group.gather(json.dumps(took).encode())))
        medians = {name: statistics.median(some[2:]) for name, some in times.items()}
        if place.rank == 0:
            facts = {"group": kind_of(group), "ranks": place.size, "count": count, "rounds": rounds}
            seconds = {name: round(value, 6) for name, value in medians.items()}
            print(json.dumps(facts | {"seconds": seconds, "of_bare": round(medians["group"] / medians["bare"], 3)}))
    sys.stdout.flush()
    group.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Start a job for each group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--nccl", action="store_true", help="compare with NCCL: each rank has a GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.counts, args.rounds, args.nccl)
        return
    from choros.comm.tcp.auth_socket import free_port

    for kind in args.groups:
        more = ["--nccl"] if args.nccl else []
        command = [sys.executable, "-m", "choros", "run", "-n", str(args.ranks), __file__, "--child"]
        command += ["--rounds", str(args.rounds), "--counts", *map(str, args.counts), *more]
        there = {**os.environ, "CHOROS_COMM": kind, "BARE_AT": f"tcp://127.0.0.1:{free_port('127.0.0.1')}"}
        done = subprocess.run(command, env=there, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
        print("\n".join(line[4:] for line in done.stdout.splitlines() if line.startswith("[0] {")), flush=True)


if __name__ == "__main__":
    main()
