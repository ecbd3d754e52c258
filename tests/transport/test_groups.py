"""The contract of every group between real processes: shared memory, MPI, TCP, several hosts.

PyTorch's sums lie over the shared memory of ``choros run`` and JAX's over MPI, both by gloo on the CPU. None of these
tests has GPUs for NCCL.
"""

import json
import sys

import pytest

HEAD = {
    "shared": """
def make(timeout):
    return SharedGroup(fd, rank, timeout=timeout, spin=0.0 if rank else 50e-6)
""",
    "mpi": """
from choros.comm.p2p.mpi_group import MpiGroup

world = MpiGroup(timeout=60)
rank, size = world.rank, world.size

def make(timeout):
    world.timeout = timeout
    return world.part(range(size))
""",
    "hosts": """
import choros.comm.hierarchical_group as hosts
from choros.comm.p2p.mpi_group import MpiGroup

world = MpiGroup(timeout=60)
rank, size = world.rank, world.size
here = hosts.machine()  # three machines of this one: ranks 0 and 3, 1 and 4, 2
hosts.machine = lambda: f"{rank % 3} {here}"

def make(timeout):
    world.timeout = timeout
    made = hosts.HierarchicalGroup(world)
    assert made.hosts == [[r for r in range(size) if r % 3 == k] for k in range(min(size, 3))]
    return made
""",
    "tcp": """
from choros.comm.shm.group import SharedGroup
from choros.comm.tcp.group import TcpGroup

rank, size = int(os.environ["CHOROS_RANK"]), int(os.environ["CHOROS_SIZE"])
near = SharedGroup(int(os.environ["CHOROS_COMM_FD"]), rank, timeout=60)

def make(timeout):
    return TcpGroup(rank, size, near.gather, b"of this test", timeout=timeout)
""",
    "torch": """
from choros.comm.bootstrap import init
from choros.comm.bootstrap.offload import with_offload
from choros.comm.shm.group import SharedGroup

rank, size = int(os.environ["CHOROS_RANK"]), int(os.environ["CHOROS_SIZE"])
whole = with_offload(SharedGroup(int(os.environ["CHOROS_COMM_FD"]), rank, timeout=60), "torch", 60)
assert whole.kind == "torch (gloo) over shared memory"

def make(timeout):
    whole.timeout = timeout
    return init.part(whole, range(size))
""",
    "jax": """
from choros.comm.bootstrap import init
from choros.comm.bootstrap.offload import with_offload
from choros.comm.p2p.mpi_group import MpiGroup

whole = with_offload(MpiGroup(timeout=60), "jax", 60)
rank, size = whole.rank, whole.size
assert whole.kind == "jax (gloo) over MPI"

def make(timeout):
    whole.timeout = timeout
    return init.part(whole, range(size))
""",
}
SAYS = """
import json, os, sys, time
import numpy as np
from choros.errors import ChorosError

def say(**facts):
    with open(os.path.join(sys.argv[1], f"{rank}.jsonl"), "a") as file:
        file.write(json.dumps(facts) + "\\n")

def trying(call):
    try:
        call()
    except ChorosError as error:
        say(error=type(error).__name__, text=str(error), missing=list(getattr(error, "missing", ())))
    else:
        say(error=None)
"""


@pytest.fixture(params=HEAD)
def meet(request, tmp_path):
    """Run a script on so many ranks; return the lines that each said."""

    def run(script, size, room=4096):
        if request.param == "shared":
            from choros.comm.shm.group import SharedGroup

            with SharedGroup.create(size, room) as segment:
                return request.getfixturevalue("ranks").start(HEAD["shared"] + script, segment, size).finish(120)
        file = tmp_path / "script.py"
        file.write_text(SAYS + HEAD[request.param] + script)
        if request.param in ("mpi", "hosts", "jax"):
            request.getfixturevalue("mpiexec")(size, sys.executable, file, tmp_path)
        else:
            from choros.launch.local_job import LaunchOptions, start

            assert start([sys.executable, str(file), str(tmp_path)], LaunchOptions(size)).code == 0
        return [
            [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()] for rank in range(size)
        ]

    return run


SUMS = """
import hashlib
from choros.comm.gather_bytes import collect

def total(values):
    found = values[0].copy()
    for more in values[1:]:
        found = found + more
    return found

class Near:
    def __init__(self, want):
        self.want = want

    def __contains__(self, found):
        return np.allclose(np.frombuffer(found, self.want.dtype), self.want, rtol=1e-5, atol=1e-5)

group, carried = make(60), 0
takes = getattr(getattr(group, "backend", None), "dtypes", ())
seen = hashlib.sha256()
for dtype in ("int8", "int32", "uint64", "float16", "float32", "float64", "complex64", "bfloat16"):
    for count in (0, 1, 2, 17, 1000, 1 << 12, 9973):
        if dtype == "bfloat16":
            from ml_dtypes import bfloat16 as dtype
        values = [(np.random.default_rng([r, count]).standard_normal(count) * 5).astype(dtype) for r in range(size)]
        want = total(values)
        hosts = [[values[r] for r in ranks] for ranks in getattr(group, "hosts", [])]
        wanted = {want.tobytes(), *([total([total(host) for host in hosts]).tobytes()] if hosts else [])}
        if want.nbytes > 1 << 14 and want.dtype.name in takes:
            carried += 1
            wanted = Near(want)  # summed in an order of the library's own
        slot = group.slot(count, dtype)
        assert slot.ctypes.data % 64 == 0
        slot[:] = values[rank]
        got = group.sum_slots(count, dtype)
        assert got.dtype == want.dtype and got.tobytes() in wanted, (dtype, count)
        assert not got.flags.writeable
        seen.update(got.tobytes())
        whole = group.sum(values[rank])
        assert whole.tobytes() in wanted and whole.flags.writeable
        seen.update(whole.tobytes())
assert bool(carried) == hasattr(group, "control")
big = np.arange(70_000.0).reshape(7, -1)
total = group.sum(big + rank)  # several chunks of a slot, and a shape
assert total.shape == (7, 10_000) and np.array_equal(total, big * size + sum(range(size)))
assert np.array_equal(group.sum(big.T[::2] + rank), big.T[::2] * size + sum(range(size)))
assert group.sum(np.float32(rank)).shape == () and float(group.sum(np.float32(rank))) == sum(range(size))
mean = group.mean(np.full(3, 200 + rank, "uint8"))
assert mean.dtype == np.float64 and np.allclose(mean, 200 + (size - 1) / 2, rtol=0, atol=1e-12)
half = group.mean(np.full(3, 60000, "float16"))
assert half.dtype == np.float16 and half.tolist() == np.full(3, 60000, "float16").tolist()
assert group.mean(np.ones(3, "float32")).dtype == np.float32
swapped = group.sum(np.arange(4, dtype=">i4"))
assert swapped.tolist() == [0, size, 2 * size, 3 * size]
parts = group.gather(bytes([rank]) * (rank * 50_000))
assert [len(p) for p in parts] == [r * 50_000 for r in range(size)] and set(parts[-1]) == {size - 1}
assert group.gather(b"") == [b""] * size
assert group.gather(bytes([rank])) == [bytes([r]) for r in range(size)]
for root in range(size):
    for lengths in ([0] * size, [r * 50_000 + 1 for r in range(size)]):
        pieces = collect(group, np.full(lengths[rank], rank, "uint8"), root)
        assert [piece.tolist() for piece in pieces] == ([[r] * lengths[r] for r in range(size)] if rank == root else [])
    sent = np.arange(30_000, dtype="float32").reshape(3, -1) * (rank + 1)
    got = group.broadcast(sent, root)
    assert got.shape == sent.shape and np.array_equal(got, np.arange(30_000).reshape(3, -1) * (root + 1))
    assert group.broadcast(np.array(rank == root), root).item() is True
    assert group.broadcast(np.zeros((0, 3)), root).shape == (0, 3)
group.barrier()
group.close()
group.close()
say(digest=seen.hexdigest())
"""


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_right_and_bit_equal(meet, size):
    """Right is what numpy gives in the order of the ranks, to the bit: so groups agree with each other too.

    Ranks of several hosts may add up in each host first.
    """
    results = meet(SUMS, size, 80_000)
    assert len(results) == size
    assert len({lines[0]["digest"] for lines in results}) == 1


def test_a_fast_rank_never_overwrites_what_a_slow_one_reads(meet):
    script = """
group = make(60)
rng = np.random.default_rng(rank)
for step in range(400):
    if rng.random() < 0.1:
        time.sleep(0.002)
    group.slot(5000, "float64")[:] = step * 10 + rank
    result = group.sum_slots(5000, "float64")
    if rng.random() < 0.1:
        time.sleep(0.002)
    want = size * step * 10 + sum(range(size))
    assert result.min() == result.max() == want, (step, want)
    if step % 7 == 0:
        group.barrier()
    if step % 11 == 0:
        assert group.gather(str(step).encode()) == [str(step).encode()] * size
say(ok=True)
"""
    assert meet(script, 3, 40_000) == [[{"ok": True}]] * 3


def test_calls_that_differ_are_told_to_every_rank_and_the_group_goes_on(meet):
    script = """
from choros.comm.gather_bytes import collect
group = make(30)
trying(lambda: group.sum_slots(5 if rank else 6, "float32"))
trying(lambda: group.sum(np.zeros(4, "float64" if rank else "float32")))
trying(lambda: group.barrier() if rank else group.gather(b"x"))
trying(lambda: group.broadcast(np.zeros(3), root=rank))
trying(lambda: collect(group, np.zeros(3, "uint8"), rank))
trying(lambda: group.barrier() if rank else group.sum(np.ones(2)))
trying(lambda: group.sum(np.zeros(500 + 500 * rank)))
trying(lambda: group.sum(np.zeros(50_000 + 50_000 * rank, "float32")))
for bad in (np.zeros(3, bool), np.array(["a"])):
    trying(lambda: group.sum(bad))
trying(lambda: group.broadcast(np.array([object()])))
trying(lambda: group.broadcast(np.zeros(1), root=size))
trying(lambda: group.slot(-1, "float32"))
say(total=float(group.sum(np.ones(1))[0]))
group.barrier()
if rank == 1:
    group.close()
    time.sleep(0.5)
else:
    trying(group.barrier)
    trying(group.barrier)
"""
    results = meet(script, 3)
    messages = [
        ("rank 0: sum_slots of 6 float32", "rank 1: sum_slots of 5 float32", "rank 2: sum_slots of 5 float32"),
        ("rank 0: sum of 4 float32", "rank 2: sum of 4 float64"),
        ("rank 0: gather", "rank 1: barrier"),
        ("rank 0: broadcast of 3 float64 from rank 0", "from rank 2"),
        ("rank 0: collect at rank 0", "rank 2: collect at rank 2"),
        ("rank 0: sum of 2 float64", "rank 1: barrier"),
        ("rank 0: sum of 500 float64", "rank 2: sum of 1,500 float64"),
        ("rank 0: sum of 50,000 float32", "rank 2: sum of 150,000 float32"),
        ("bool cannot be summed",),
        ("cannot be summed",),
        ("objects",),
        ("give 0 to 2",),
        (),
    ]
    for rank, lines in enumerate(results):
        for number, (line, expected) in enumerate(zip(lines, messages, strict=False)):
            assert line["error"] == ("CallsDifferError" if number < 8 else "InvalidInputError")
            assert all(word in line["text"] for word in expected), line["text"]
        assert lines[13] == {"total": 3.0}
        assert len(lines) == (14 if rank == 1 else 16)
    for rank in (0, 2):
        assert [line["error"] for line in results[rank][14:]] == ["PeerLostError"] * 2
        assert "rank 1" in results[rank][14]["text"]
        assert "left" in results[rank][14]["text"]
        assert "failed before" in results[rank][15]["text"]
