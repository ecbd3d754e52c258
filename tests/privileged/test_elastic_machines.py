"""Elastic jobs on several machines, which are namespaces of this one: hosts that come, go, die and are cut off."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

SCRIPT = """
import os, sys, time
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import numpy as np
import choros.hvd as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    place = f"{hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()} on {hvd.cross_rank()}"
    print(f"said {place} of {hvd.cross_size()} at {os.uname().nodename} from step {min(state.step, 1)}", flush=True)
    while True:
        if (hvd.rank(), state.step) == (1, 5) and os.path.exists("kill"):
            os.unlink("kill")
            os.kill(os.getpid(), 9)
        end = hvd.rank() == 0 and os.path.exists("end")
        summed = hvd.allreduce(np.full(5000, float(end)), op=hvd.Sum)
        total = hvd.allreduce(np.array([1.0, state.step]), op=hvd.Sum)
        assert total.tolist() == [hvd.size(), state.step * hvd.size()], total
        state.step += 1
        state.commit()
        if state.step == 2:
            print("has committed", flush=True)
        if summed[0]:
            return
        time.sleep(0.01)

train(state)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    jobs = []

    def run(*arguments, head=(), **environment):
        job = subprocess.Popen(
            [*head, sys.executable, "-m", "choros", "run", *arguments, "script.py"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        jobs.append(job)
        alarm = threading.Timer(120, job.kill)
        alarm.daemon = True
        alarm.start()
        return job

    yield run
    for job in jobs:
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
        job.communicate(timeout=20)


def lines(job, message, count):
    """The groups of so many lines that fit, and all that was read."""
    results, read = [], []
    for line in job.stdout:
        read.append(line)
        if match := re.search(message, line):
            results.append(match.groups())
            if len(results) == count:
                return sorted(results), "".join(read)
    raise AssertionError("".join(read))


PLACE = r"said (\d) of {}, (\d) of (\d) on (\d) of (\d) at (\w+) from step {}"


def test_a_killed_rank_leaves_the_others_and_a_host_comes(start, ssh, tmp_path):
    (tmp_path / "kill").touch()
    (tmp_path / "hosts").write_text("one:2\ntwo:1\n")
    job = start("-n", "3", "--min-np", "2", "--host-discovery-script", "cat hosts", "--ssh", str(ssh))
    result, _ = lines(job, PLACE.format(3, 0), 3)
    assert [each[1:] for each in result] == [
        ("0", "2", "0", "2", "one"),
        ("1", "2", "0", "2", "one"),
        ("0", "1", "1", "2", "two"),
    ]
    result, output = lines(job, PLACE.format(2, 1), 2)
    assert re.search(
        r"rank 1 \(process 1, pid \d+, host one\) exited with code 137; ranks of its generation that continue: 2",
        output,
    )
    assert [each[5] for each in result] == ["one", "two"]
    (tmp_path / "new").write_text("one:2\ntwo:1\nthree:1\n")
    (tmp_path / "new").rename(tmp_path / "hosts")
    result, _ = lines(job, PLACE.format(3, 1), 3)
    assert [each[5] for each in result] == ["one", "two", "three"]
    (tmp_path / "end").touch()
    out = job.communicate(timeout=60)[0]
    assert job.returncode == 0, out


@pytest.mark.parametrize("how", ["the network is cut", "the host dies"])
def test_a_host_that_is_lost_is_left_out_within_seconds(start, network, how, tmp_path):
    command = ("--min-np", "2", "-H", "one:2,two:1", "--ssh", str(network.ssh), "--network", "10.79.7.0/24")
    job = start("-n", "3", *command, head=network.head, CHOROS_PULSE="6")
    result, output = lines(job, PLACE.format(3, 0), 3)
    assert [each[5] for each in result] == ["one", "one", "two"]
    if missing := 3 - output.count("has committed"):  # so that the others go on from a commit of their own
        lines(job, "(has committed)", missing)
    if how == "the network is cut":
        subprocess.run(["ip", "-n", f"{network.prefix}-two", "link", "set", "eth0", "down"], check=True)
        why = r"sent no heartbeat for \d s and is ended"
    else:
        pids = subprocess.run(["ip", "netns", "pids", f"{network.prefix}-two"], capture_output=True, text=True).stdout
        for pid in pids.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        why = r"exited with code \d+"
    result, output = lines(job, PLACE.format(2, 1), 2)
    assert re.search(
        rf"rank 2 \(process 2, pid \d+, host two\) {why}; ranks of its generation that continue: 2", output
    ), output
    assert [each[1:] for each in result] == [("0", "2", "0", "1", "one"), ("1", "2", "0", "1", "one")]
    (tmp_path / "end").touch()
    out = job.communicate(timeout=60)[0]
    assert job.returncode == 0, out
