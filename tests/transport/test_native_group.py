"""Sums by PyTorch or JAX: a rank that dies or stops in the middle of one, and a library that cannot be had."""

import signal
import subprocess
import sys
import time

import pytest

from choros.comm.shm.group import SharedGroup

# Three ranks sum for ever; the one of the marked number is no longer there in the middle of it.
SCRIPT = """
import threading
sys.stdout = os.fdopen(os.dup(1), "w")  # JAX's gloo says who is connected on the other one
os.dup2(2, 1)
from choros.comm.bootstrap.offload import with_offload

group = with_offload(SharedGroup(fd, rank, timeout=60), "{library}", 60)
group.timeout = 3
x = np.ones(4_000_000, "float32")
group.sum(x)
if rank == {victim}:
    say(pid=os.getpid())
    threading.Timer(0.1, os.kill, (os.getpid(), signal.{how})).start()

def sums():
    while True:
        group.sum(x)

trying(sums)
"""


def start(ranks, segment, library, victim, how):
    ranks.start(SCRIPT.format(library=library, victim=victim, how=how), segment, 3)
    assert ranks.next_line(victim)["pid"] == ranks.processes[victim].pid


@pytest.mark.parametrize(("library", "victim"), [("torch", 0), ("torch", 1), ("jax", 1)])
def test_a_rank_killed_in_the_middle_is_an_error_on_the_others(ranks, library, victim):
    with SharedGroup.create(3, 1 << 16) as segment:
        start(ranks, segment, library, victim, "SIGKILL")
        output = ranks.finish(60, {victim: -signal.SIGKILL})
    for rank in {0, 1, 2} - {victim}:
        (line,) = output[rank]
        assert line["error"] == "PeerLostError", line
        assert line["seconds"] < 10
    assert any(f"rank {victim}" in line["text"] for lines in output for line in lines)


def test_when_rank_0_is_killed_jax_ends_the_others_at_once_or_they_say_so(ranks):
    with SharedGroup.create(3, 1 << 16) as segment:
        start(ranks, segment, "jax", 0, "SIGKILL")
        begin = time.monotonic()
        for rank in (1, 2):
            code = ranks.processes[rank].wait(30)
            output = ranks.processes[rank].stdout.read() + ranks.processes[rank].stderr.read()
            assert code == -signal.SIGABRT or "PeerLostError" in output, (code, output)
            assert "another task died" in output or "PeerLostError" in output, output
        assert time.monotonic() - begin < 15


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_rank_that_stops_in_the_middle_is_missed_when_the_time_is_over(ranks, library):
    with SharedGroup.create(3, 1 << 16) as segment:
        start(ranks, segment, library, 1, "SIGSTOP")
        for rank in (0, 2):
            line = ranks.next_line(rank)
            assert line["error"] in ("CommTimeoutError", "PeerLostError"), line
            assert line["seconds"] < 12
        assert ranks.processes[0].wait(20) == 0  # a library's call that hangs does not hold the process
        assert ranks.processes[2].wait(20) == 0
        ranks.kill(1)


LATE = """
import numpy as np
import choros, choros.hvd as hvd
import jax
jax.numpy.zeros(3)
try:
    hvd.init()
except choros.InvalidInputError as error:
    print("refused:", error, flush=True)
"""


def test_a_jax_that_was_used_before_is_refused_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(LATE)
    monkeypatch.setenv("CHOROS_COMM", "jax")
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "refused:" in line]
    assert len(lines) == 2
    assert all('call choros.native.initialize("jax") at the top of the script' in line for line in lines)


ENDS = """
import os, sys, time
import numpy as np
import choros.comm.hierarchical_group as hosts
from choros.comm.bootstrap.offload import with_offload
from choros.comm.p2p.mpi_group import MpiGroup

world = MpiGroup(timeout=60)
here = hosts.machine()
hosts.machine = lambda: f"{world.rank % 2} {here}"  # two machines of this one
group = with_offload(hosts.HierarchicalGroup(world), sys.argv[1], 60)
assert group.kind == f"{sys.argv[1]} (gloo) over MPI over 2 hosts, sums in each host first"
assert group.sum(np.full(100_000, world.rank, "float32"))[-1] == 3
if world.rank == 1:
    time.sleep(2)  # the others have no more to do long before
    print("rank 1 went on", flush=True)
"""


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_ranks_of_several_hosts_end_in_their_own_time(mpiexec, tmp_path, library):
    (tmp_path / "script.py").write_text(ENDS)
    assert "rank 1 went on" in mpiexec(3, sys.executable, tmp_path / "script.py", library, timeout=60)
