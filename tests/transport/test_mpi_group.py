"""What is MPI's own: limits, deaths, exceptions, launchers that do not fit, and that a rank that waits takes no core."""

import os
import sys

import pytest

HEAD = """
import os, signal, sys, time
import numpy as np
from choros.errors import ChorosError
from choros.transport import Group
from choros.transport.mpi_group import MpiGroup

group = MpiGroup(timeout=60)
rank, size = group.rank, group.size

def trying(call):
    begun = time.perf_counter()
    try:
        call()
    except ChorosError as error:
        print(f"<{rank} {type(error).__name__} {time.perf_counter() - begun:.2f} s: {error}>", flush=True)
"""


@pytest.fixture
def run(mpiexec, tmp_path):
    def start(size, text, head=HEAD, **more):
        (tmp_path / "script.py").write_text(head + text)
        return mpiexec(size, sys.executable, tmp_path / "script.py", **more)

    return start


def said(out, rank):
    """The lines of one rank, wherever the launcher mixed them in."""
    return [line.split(f"<{rank} ", 1)[1] for line in out.splitlines() if f"<{rank} " in line]


def test_waiting_takes_no_core_and_a_limit_names_who_is_missing(run):
    text = """
assert isinstance(group, Group)
if rank == 2:
    time.sleep(1.5)
before, begun = time.process_time(), time.perf_counter()
group.barrier()
if rank != 2:
    waited = time.perf_counter() - begun
    assert waited > 0.7, waited
    print(f"<{rank} share {(time.process_time() - before) / waited:.3f}>", flush=True)
group.sum(np.ones(100_000))
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
group.timeout = 0.7
trying(lambda: group.sum_slots(10, "float32"))
trying(group.barrier)
if rank == 0:
    sys.stdout.flush()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)  # nothing wakes rank 2: the launcher ends it
time.sleep(30)
"""
    out = run(3, text, code=None, timeout=60)
    for rank in (0, 1):
        share, limit, broken = said(out, rank)
        assert float(share.split()[1].rstrip(">")) < 0.2, out
        kind, seconds, _ = limit.split(maxsplit=2)
        assert kind == "MeetingTimeout"
        assert 0.7 <= float(seconds) < 3
        assert f"rank {rank} on {os.uname().nodename} waited" in limit
        assert "at sum_slots of 10 float32 for rank 2 of 3" in limit
        assert "PeerFailed" in broken
        assert "failed before" in broken


def test_an_exception_ends_the_job_and_its_traceback_comes_first(run):
    text = """
if rank == 1:
    raise ValueError("the cause")
group.barrier()
print("<0 went on>")
"""
    out = run(2, text, code=1, timeout=30)
    assert "ValueError: the cause" in out
    assert "script.py" in out
    assert "went on" not in out


def test_a_rank_that_ends_early_is_named(run):
    """By sys.exit, where the others are told; by os._exit, where MPICH goes on and Open MPI ends the job."""
    text = """
if rank == 1:
    sys.exit(0)
trying(group.barrier)
os._exit(0)
"""
    assert "PeerFailed" in said(run(2, text, code=None, timeout=30), 0)[0]
    text = text.replace("sys.exit(0)", "os._exit(0)")
    out = run(2, text, code=None, timeout=30)
    assert not said(out, 0) or "rank 1 (process" in said(out, 0)[0]


def test_a_rank_that_is_done_waits_asleep_for_the_others(run):
    text = """
import atexit
if rank:
    time.sleep(1.5)
else:
    @atexit.register
    def _():
        print("not called: registered after the group's own", flush=True)
    atexit.unregister(_)
    begun = time.process_time()
    group._mesh.end()
    print(f"<0 {time.process_time() - begun:.3f}>", flush=True)
"""
    assert float(said(run(2, text), 0)[0].rstrip(">")) < 0.3


def test_ranks_of_which_some_never_start_mpi(run):
    text = """
import sys, time, os
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank:
    time.sleep(4)
    os._exit(0)
from choros.transport.mpi_group import MpiGroup
MpiGroup(timeout=1)
"""
    out = run(2, text, head="", code=None, timeout=30)
    assert "rank 0 on" in out
    assert "waited 1 s in MPI_Init" in out


# -- what is refused before or without a job
def test_what_cannot_start(clean_start):
    assert "choros[mpi-wheel]" in clean_start("sys.modules['mpi4py'] = None")
    assert "cannot be started again" in clean_start(
        "from mpi4py import MPI\nMPI.Finalize()" if os.environ.get("CHOROS_TEST_MPI_SINGLE") else "",
    )


@pytest.fixture
def clean_start(mpiexec):
    raise NotImplementedError
