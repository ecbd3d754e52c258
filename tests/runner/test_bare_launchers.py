"""A rank that raises under a launcher that is not ours: the job ends at once; its last lines say rank, code and why."""

import os
import secrets
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long  # .ci/run runs these with the other launchers


@pytest.mark.parametrize(("how", "code"), [("script", 1), ("callback", 1), ("trainer", 1), ("exit", 3)])
def test_under_mpiexec(failing, mpiexec, how, code):
    command, needed = mpiexec.starting(2, sys.executable)
    failing(command, how, code=code, **needed)


@pytest.mark.parametrize("how", ["script", "trainer"])
def test_under_torchrun_whose_report_has_the_traceback(failing, how):
    """It says rank and code itself, and reads the traceback in a file in which a rank has to leave it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    report = failing(torchrun, how, says=False).partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "exitcode  : 1 " in report
    assert "traceback : Traceback (most recent call last):" in report
    assert "ValueError: the cause" in report


def test_ranks_that_nobody_ends_end_each_other(failing, tmp_path):
    """Pods of a job: each is started alone, and rank 0 awaits nothing of rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    pod = f"JOB_COMPLETION_INDEX=$i exec {sys.executable} $0 $1"
    pods = f"for i in 0 1; do ({pod}; ) & done; wait %1; first=$?; wait %2; echo codes $first $?; exit $first"
    facts = {"CHOROS_COMPLETIONS": "2", "CHOROS_COORDINATOR": place, "CHOROS_SECRET": secrets.token_hex(32)}
    end = failing(["bash", "-c", pods], "trainer", **facts)
    assert f"choros: rank 0 on {os.uname().nodename} ends, as rank 1 on {os.uname().nodename} has failed" in end
    assert "codes 1 1" in end


QUIET = """
import os, sys, time
import numpy as np
import choros.hvd as hvd

hvd.init()
hvd.allreduce(np.ones(10_000))
if hvd.rank() == 0:
    time.sleep(6)
    print("rank 0 was left alone", flush=True)
"""


def test_a_rank_that_is_done_ends_no_other(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    facts = {"CHOROS_COMPLETIONS": "2", "CHOROS_COORDINATOR": place, "CHOROS_SECRET": secrets.token_hex(32)}
    pods = []
    for rank in range(2):
        environment = {**os.environ, **facts, "JOB_COMPLETION_INDEX": str(rank)}
        pods.append(subprocess.Popen([sys.executable, "-c", QUIET], env=environment, stdout=subprocess.PIPE, text=True))
    output = [pod.communicate(timeout=60)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0]
    assert "rank 0 was left alone" in output[0]
