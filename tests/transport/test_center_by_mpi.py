"""The center's vectors by MPI: the same bits as by TCP, also where servers die; a limit; and where it is refused."""

import os
import re
import secrets
import subprocess
import sys

import pytest

HEAD = """
import os, random, signal, sys, threading, time
import numpy as np
from choros import algorithms
from choros.comm import hierarchical_group
from choros.comm.p2p.mpi_group import MpiGroup
from choros.errors import ChorosError
from choros.training.spec import FitConfig
from choros.training.worker.comm_setup import connect_ranks

group = MpiGroup(timeout=60)
rank, size = group.rank, group.size
here = hierarchical_group.machine()
hierarchical_group.machine = lambda: f"{here} {rank}"  # each rank is as on a host of its own
SIZE = 300_000  # a center that hosts divide

def connect(rule, by_mpi, timeout=30.0):
    os.environ["CHOROS_COMM"] = "mpi" if by_mpi else ""
    job = FitConfig(algorithms.to_config(rule), "async", size, 12, 1, timeout=timeout)
    rng = np.random.default_rng(1)
    start = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(5).astype("float32")
    return connect_ranks(group, job, rule, 4 * SIZE, lambda: start)
"""
TURNS = """
def run(rule, by_mpi, kill=False):
    rng, turns, found = np.random.default_rng(2 + rank), 12, []
    with_servers = connect(rule, by_mpi)
    center = with_servers.center
    kind = "vectors by MPI" in center.kind
    local, others = np.empty(SIZE, "float32"), np.empty(5, "float32")
    center.read(local, others)
    seen = local.copy()
    group.barrier()
    for turn in range(turns):  # one rank at a time, so the result does not depend on time
        if kill and turn in (2, 6, 9) and with_servers.server is not None:
            victim = with_servers.server._process.pid
            threading.Timer(random.uniform(0, 0.01), os.kill, (victim, signal.SIGKILL)).start()
        if turn % size == rank:
            local += rng.standard_normal(SIZE).astype("float32")
            others += 1
            found += [center.exchange(local, seen, 4, others), local.copy(), seen.copy(), others.copy()]
        group.barrier()
    local += 1
    center.publish_pending(local, seen, 2, others)
    group.barrier()
    out, mean = np.empty_like(local), np.empty_like(others)
    center.trial(out, mean)
    found += [out.copy(), mean.copy()]
    group.barrier()
    if rank == 1:
        center.replace(np.arange(SIZE, dtype="float32"), np.zeros(5, "float32"))
    group.barrier()
    found += [center.read(out, mean), out.copy(), mean.copy()]
    center.exchange(local, seen, 4, others)
    found += [local.copy()]
    group.barrier()
    with_servers.close()
    return kind, found

for make in (algorithms.AEASGD, algorithms.DOWNPOUR, algorithms.DynSGD, algorithms.ADAG):
    rule = make().bound(size, 0.01, strict=False)
    (tcp, expected), (mpi, found) = run(rule, False), run(rule, True)
    killed = run(rule, True, kill=True)[1] if make is algorithms.AEASGD else found
    assert (tcp, mpi) == (False, True), (tcp, mpi)
    assert len(expected) == len(found) == len(killed) > 20
    for values in zip(expected, found, killed):
        for other in values[1:]:
            np.testing.assert_array_equal(values[0], other)
    assert found[-1][3] == 3.0  # the center that was set
    print(f"<{rank} {make.__name__} {len(found)}>", flush=True)
"""


@pytest.fixture
def run(mpiexec, tmp_path):
    def start(size, text, head=HEAD, **more):
        (tmp_path / "script.py").write_text(head + text)
        return mpiexec(size, sys.executable, tmp_path / "script.py", **more)

    return start


def test_one_rank_at_a_time_gives_the_bits_of_tcp_also_where_servers_are_killed(run):
    out = run(3, TURNS)
    for rank in range(3):
        assert re.findall(rf"<{rank} (\w+) \d+>", out) == ["AEASGD", "DOWNPOUR", "DynSGD", "ADAG"], out
    assert out.count("continues with the same center, restart") >= 3, out


def test_a_rank_that_is_stopped_is_named_in_time_and_an_idle_relay_takes_no_core(run):
    text = """
pids = [int(pid) for pid in group.gather(str(os.getpid()).encode())]
center = connect(algorithms.AEASGD().bound(size, 0.01), True, timeout=2.0).center
local, others = np.empty(SIZE, "float32"), np.empty(5, "float32")
center.read(local, others)
seen = local.copy()
center.exchange(local, seen, 4, others)
group.barrier()
begun = time.process_time(), time.perf_counter()
time.sleep(1.0)
print(f"<{rank} share {(time.process_time() - begun[0]) / (time.perf_counter() - begun[1]):.3f}>", flush=True)
group.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
begun = time.perf_counter()
try:
    center.exchange(local, seen, 4, others)
except ChorosError as error:
    print(f"<{rank} {type(error).__name__} {time.perf_counter() - begun:.2f} {error}>", flush=True)
os.kill(pids[1], signal.SIGKILL)
os._exit(1)
"""
    out = run(2, text, code=None, timeout=60)
    for rank in range(2):
        assert float(re.search(rf"<{rank} share ([\d.]+)>", out)[1]) < 0.1, out
    kind, seconds, message = re.search(r"<0 (\w+) ([\d.]+) ([^>]*)>", out).groups()
    assert kind == "CommTimeoutError", out
    assert 2.0 <= float(seconds) < 6.0
    assert f"The center's server on {os.uname().nodename} (rank 1)" in message  # by its limit, or by the server's
    assert "2.0 s" in message


def test_vectors_go_by_tcp_if_mpi_was_started_for_one_thread_at_a_time(run):
    text = """
center = connect(algorithms.AEASGD().bound(size, 0.01), True).center
print(f"<{rank} {center.kind}>", flush=True)
group.barrier()
"""
    out = run(2, text, head="import mpi4py\nmpi4py.rc.thread_level = 'serialized'\nfrom mpi4py import MPI\n" + HEAD)
    assert len(re.findall(r"<\d a center divided among 2 hosts>", out)) == 2, out
    assert out.count("The center's vectors are sent by TCP, not by MPI (CHOROS_COMM=mpi): ranks 0, 1 started") == 1


def test_ranks_that_mpi_did_not_start_are_refused(mpiexec, tmp_path):
    (tmp_path / "script.py").write_text("import choros.hvd as hvd\nhvd.init()\nprint('went on')\n")
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "--threads", "1", "script.py"]
    there = {**os.environ, "CHOROS_COMM": "mpi", "CHOROS_SECRET": secrets.token_hex(32)}
    job = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=90)
    assert job.returncode != 0
    assert "says the launcher, but in its group it is rank 0 of 1: the ranks would train separate models" in (
        job.stdout + job.stderr
    )
    assert "went on" not in job.stdout
