"""All-reduce from a backend's tensors back to a backend's tensors, in memcpys of the whole vector in the same run.

Two ranks, one core and one thread each, three float32 tensors a rank. In every round, in turn: a copy of the vector
by one rank alone (the baseline); tensors into the slot, sum, and new tensors that own their memory; the same, but the
new tensors are the sum where it lies, as ``Replica.apply`` reads it on JAX and TensorFlow. Medians, of the slowest
rank. Prints JSON.

    python benchmarks/allreduce_tensors.py --backend jax
"""

import ctypes
import itertools
import json
import statistics
import time

import numpy as np
from common import arguments, pin, ranks


def rank_main(fd: int, rank: int, side: int, rounds: int, backend: str) -> None:
    pin(rank)
    from choros.comm.shm.group import SharedGroup
    from choros.comm.shm.segment import Segment

    shapes = [(side, side), (side, side), (side, side * 7 // 9)]
    ends = np.cumsum([0, *(a * b for a, b in shapes)]).tolist()
    count = ends[-1]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    group = SharedGroup(Segment.attach(fd), rank, timeout=120)
    rng = np.random.default_rng(rank)
    arrays = [rng.random(shape, dtype="float32") for shape in shapes]
    tensors, read, copy, borrow = ways(backend, arrays)
    slot = group.slot(count, "float32")
    source = np.concatenate([array.reshape(-1) for array in arrays])
    target = np.ones(count, "float32")
    taken: dict[str, list[float]] = {}

    def timed(name: str, call, alone: bool = False) -> None:
        group.barrier()
        begin = time.perf_counter()
        saved = None if alone and rank else call()
        taken.setdefault(name, []).append(time.perf_counter() - begin)
        group.barrier()  # what was kept may lie in the segment: it is dropped before that is written again
        del saved

    def reduce(back) -> list:
        for part, tensor in zip(parts, tensors, strict=True):
            np.copyto(slot[part], read(tensor).reshape(-1))
        total = group.sum_slots(count, "float32")
        return back([total[part].reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

    for _ in range(rounds):
        timed("memcpy", lambda: np.copyto(target, source), alone=True)
        timed("into_own_tensors", lambda: reduce(copy))
        timed("into_the_sum_as_tensors", lambda: reduce(borrow))
    gathered = [json.loads(text) for text in group.gather(json.dumps(taken).encode())]
    if rank == 0:
        base = statistics.median(gathered[0]["memcpy"])
        slowest = {name: statistics.median(map(max, zip(*[g[name] for g in gathered], strict=True))) for name in taken}
        slowest["memcpy"] = base
        result = {"count": count, "milliseconds": {name: round(1e3 * value, 2) for name, value in slowest.items()}}
        print(json.dumps(result | {"memcpys": {name: round(value / base, 2) for name, value in slowest.items()}}))
    group.barrier()
    group.close()


def ways(backend: str, arrays: list) -> tuple:
    """(tensors, tensor to host array, host arrays to tensors of their own, host arrays as tensors)."""
    if backend == "jax":
        import jax

        def own(values: list) -> list:
            return jax.block_until_ready([jax.numpy.array(result, copy=True) for result in values])

        return [jax.numpy.array(a) for a in arrays], np.asarray, own, lambda values: [jax.device_put(f) for f in values]
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
        saved = [torch.from_numpy(a) for a in arrays]
        targets = [torch.empty_like(tensor) for tensor in saved]

        def fill(values: list) -> list:
            for tensor, result in zip(targets, values, strict=True):
                np.copyto(tensor.numpy(), result)
            return targets

        return (
            saved,
            lambda tensor: tensor.numpy(),
            fill,
            lambda values: [torch.from_numpy(writable(f)) for f in values],
        )
    import tensorflow as tf

    def lent(values: list) -> list:
        return [tf.experimental.dlpack.from_dlpack(writable(result).__dlpack__()) for result in values]

    return [tf.constant(a) for a in arrays], np.asarray, lambda values: [tf.constant(f) for f in values], lent


def writable(array: np.ndarray) -> np.ndarray:
    """The same memory without the mark that it is only to be read, which DLPack and PyTorch cannot carry."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def main() -> None:
    child = {"type": int, "nargs": 4, "metavar": ("FD", "RANK", "SIDE", "ROUNDS"), "help": "for its own ranks"}
    options = arguments(__doc__, side={"type": int, "default": 3000, "help": "sqrt(values / 2.78)"}, child=child)
    if options.child:
        rank_main(*options.child, options.backend)
        return
    from choros.comm.shm.group import SharedGroup

    side = 90 if options.quick else options.side
    rounds = options.rounds or (3 if options.quick else 15)
    with SharedGroup.create(2, 4 * 3 * side * side) as segment:
        command = ["--backend", options.backend, "--child", segment.fd]
        figures = ranks([[*command, rank, side, rounds] for rank in range(2)], [segment.fd])
    head = {"benchmark": "allreduce_tensors", "backend": options.backend, "quick": options.quick}
    print(json.dumps({**head, "ranks": 2, "rounds": rounds, **figures}, indent=1))


if __name__ == "__main__":
    main()
