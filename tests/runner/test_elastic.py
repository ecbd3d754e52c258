"""Elastic jobs of real processes: ranks that come, go, hang and fail, and how such a job ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

SCRIPT = """
import os, sys, time
import keras  # what takes long comes before init: a new rank is ready then
import numpy as np
import choros.hvd as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0, total=0.0)
room, begun = sys.argv[1], hvd.size()

@hvd.elastic.run
def train(state):
    print(f"said {os.getpid()} rank {hvd.rank()} of {hvd.size()} from step {state.step}", flush=True)
    while True:
        end = hvd.rank() == 0 and os.path.exists(f"{room}/end")
        fail = os.path.exists(f"{room}/fail-{hvd.rank()}")
        summed = hvd.allreduce(np.array([1.0, end, state.step]), op=hvd.Sum)
        assert summed[0] == hvd.size() and summed[2] == state.step * hvd.size(), summed  # all have the same state
        state.step, state.total = state.step + 1, state.total + summed[0]
        if fail:
            os.unlink(f"{room}/fail-{hvd.rank()}")
            os._exit(3)
        if os.path.exists(f"{room}/hang-{hvd.rank()}"):
            time.sleep(1000)
        state.commit()
        if state.step == 2:
            print("has committed", flush=True)
        if summed[1]:
            return
        time.sleep(0.01)

train(state)
print(f"done rank {hvd.rank()} of {hvd.size()} with {state.total / state.step:.3f}", flush=True)
"""
LIGHT = """
import os, sys, time
import choros.hvd as hvd
hvd.init()
print(f"said {os.getpid()} rank {hvd.rank()} of {hvd.size()}", flush=True)
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.02)
"""

CUT = (
    LIGHT.replace(
        "while not",
        """
place = int(json.loads(os.environ[ELASTIC])["place"].rpartition(":")[2])
for fd in os.listdir("/proc/self/fd") if hvd.rank() == 1 else ():
    try:
        end = socket.socket(fileno=os.dup(int(fd)))
        if end.getpeername()[1] == place:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:  # not a socket with another end
        pass
while not""",
    )
    .replace("import os", "import json, socket, os")
    .replace(
        "hvd.init()",
        """
from choros.comm.bootstrap.init import ELASTIC
hvd.init()""",
    )
)


class Job:
    """An elastic job of that script: what it prints, and what it is told."""

    def __init__(self, room, options, script=SCRIPT, **environment):
        self.room, self.lines, self._more = room, [], threading.Condition()
        (room / "script.py").write_text(script)
        command = [sys.executable, "-m", "choros", "run", "--threads", "1", *options, "script.py", str(room)]
        self.process = subprocess.Popen(
            command,
            cwd=room,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()

    @property
    def text(self):
        return "\n".join(self.lines)

    def wait(self, message, count=1, within=60.0):
        """Wait until so many lines fit; return what their groups say."""

        def found():
            return [match.groups() for line in list(self.lines) if (match := re.search(message, line))]

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= count, within), self.text
        return found()

    def offer(self, *lines):
        """Set the output of the discovery script."""
        (self.room / "new").write_text("".join(f"{line}\n" for line in lines))
        (self.room / "new").rename(self.room / "hosts")

    def finish(self, code=0, within=60.0):
        """Wait for the end, and see that nothing is left."""
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text) from None
        self._reader.join(20)
        assert self.process.returncode == code, self.text
        for (pid,) in self.wait(r"said (\d+) rank", 0):
            assert not os.path.exists(f"/proc/{pid}"), self.text
        return self.text

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        self.process.stdout.close()


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*options, **more):
        started.append(Job(tmp_path, options, **more))
        return started[-1]

    yield start
    for result in started:
        result.close()


def test_a_job_grows_shrinks_and_leaves_out_a_rank_that_hangs(job, tmp_path):
    (tmp_path / "hosts").write_text("localhost:2\n")
    options = ("--host-discovery-script", "cat hosts", "--min-np", "2", "--max-np", "3", "--network", "lo")
    running = job(*options, "--blacklist-cooldown-range", "500", "600", CHOROS_PULSE="8")
    first = dict(running.wait(r"said (\d+) rank (\d) of 2 from step 0", 2))
    assert sorted(first.values()) == ["0", "1"]
    running.offer("localhost:2", "127.0.0.1:5")  # one more than --max-np allows is there, and three more
    grown = running.wait(r"said (\d+) rank (\d) of 3 from step (\d+)", 3)
    assert {pid: rank for pid, rank, _ in grown if pid in first} == first
    ((new, _, step),) = [each for each in grown if each[0] not in first]
    assert [step for _, _, step in grown] == [step] * 3  # of rank 0, which the new one has taken
    assert int(step) > 0
    running.offer("localhost:2")
    shrunk = running.wait(r"said (\d+) rank (\d) of 2 from step ([1-9]\d*)", 2)
    assert {pid: rank for pid, rank, _ in shrunk} == first
    running.wait("no longer part of this job and exits")
    running.offer("localhost:1", "127.0.0.1:2")  # again, with a change of who goes and who comes
    moved = running.wait(r"said (\d+) rank (\d) of 3 from step ([1-9]\d*)", 6)[3:]
    assert sorted(rank for _, rank, _ in moved) == ["0", "1", "2"]
    assert (next(pid for pid, rank, _ in moved if rank == "0")) in first
    hung = next(pid for pid, rank, _ in moved if rank == "1")
    os.kill(int(hung), signal.SIGSTOP)
    running.wait(rf"rank 1 \(process \d, pid {hung}, host \S+\) sent no heartbeat for \d s and is ended; ranks of its")
    remaining = running.wait(r"said (\d+) rank (\d) of 2 from step ([1-9]\d*)", 4)[2:]
    assert [pid for pid, _, _ in sorted(remaining, key=lambda each: each[1])] == [
        pid for pid, rank, _ in sorted(moved, key=lambda each: each[1]) if rank != "1"
    ]
    (tmp_path / "end").touch()
    running.wait(r"done rank (\d) of 2 with (\d\.\d+)", 2)
    assert new
    running.finish()


def test_a_rank_whose_socket_broke_and_that_lives_is_ended(job, tmp_path):
    running = job("-n", "2", "--min-np", "1", script=CUT, CHOROS_PULSE="5")
    running.wait(r"said (\d+) rank \d of 2", 2)
    running.wait(r"rank 1 \(process \d, pid \d+, host \S+\) sent no heartbeat for \d s and is ended", within=30)
    (tmp_path / "end").touch()
    running.finish(137)


def test_a_slot_is_used_again_after_its_cooldown_until_the_limit_of_resets(job, tmp_path):
    options = ("-n", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.5", "1", "--reset-limit", "2")
    running = job(*options)
    running.wait("has committed", 2)
    (tmp_path / "fail-1").touch()
    assert running.wait(
        r"exited with code 3; ranks of its generation that continue: 1; new ranks on localhost: none for (\S+) s"
    )
    running.wait(r"rank 0 of 1 from step [1-9]")
    running.wait(r"rank \d of 2 from step [1-9]", 2)
    (tmp_path / "fail-1").touch()
    output = running.finish(code=3)
    assert "the job ends with code 3, as its ranks have changed more often than --reset-limit 2 allows" in output


def test_a_script_that_hangs_is_given_up_and_below_the_fewest_ranks_the_job_ends(job, tmp_path):
    running = job("-n", "2", "--min-np", "2", "--stall-check-shutdown-time-seconds", "2", "--start-timeout", "6")
    running.wait(r"said (\d+) rank \d of 2", 2)
    (tmp_path / "hang-0").touch()
    output = running.finish(code=137)
    assert "did not join the new generation within 6 s and is ended; ranks of its generation that continue: 1" in output
    text = "1 of the 2 ranks that it needs are ready; its hosts have no slot left; excluded after failures"
    assert f"the job ends with code 137, as {text}: localhost" in output


def test_too_few_slots_for_too_long(job, tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n")
    options = ("--host-discovery-script", "cat hosts", "-n", "2", "--elastic-timeout", "8", "--network", "lo")
    output = job(*options, script="import choros.hvd as hvd; hvd.init()").finish(code=1)
    assert re.search(
        r"for \d+ s \(--elastic-timeout\) 1 of the 2 ranks that it needs are ready; hosts: localhost:1", output
    )


def test_a_script_that_fails_is_told_and_its_last_answer_kept(job, tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n")
    running = job("--host-discovery-script", "cat hosts", "--min-np", "1", "--network", "lo", script=LIGHT)
    running.wait(r"said (\d+) rank 0 of 1")
    (tmp_path / "hosts").unlink()
    running.wait("the host discovery script failed with code 1: .*hosts.*; the hosts that it named last are kept")
    running.offer("localhost one")
    running.wait("printed what cannot be read: line 1 is 'localhost one'.*; the hosts that it named last are kept")
    running.offer("localhost:1")
    running.wait("the host discovery script works")
    (tmp_path / "end").touch()
    assert running.finish().count("said") == 1


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("raise SystemExit(7)", 7, "no rank has reached hvd.init"),
        ("import choros.hvd as hvd; hvd.init(); raise SystemExit(7)", 7, "all ranks have failed"),
        ("pass", 0, ""),
    ],
)
def test_ranks_that_all_end_alike_end_the_job(job, script, code, message):
    output = job("-n", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2", script=script).finish(code=code)
    assert message in output


def test_a_trainer_of_an_elastic_job_is_told_to_meet_first(job):
    script = "from choros.comm.bootstrap.init import join; join(0, 2, 5.0)"
    assert "an elastic job, whose ranks connect in hvd.init()" in job("-n", "2", "--min-np", "1", script=script).finish(
        1
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_when_the_driver_is_told_to_end_or_is_killed_no_rank_is_left(job, number, code):
    running = job("-n", "2", "--min-np", "1", script=LIGHT)
    pids = [int(pid) for (pid,) in running.wait(r"said (\d+) rank \d of 2", 2)]
    running.process.send_signal(number)
    assert running.process.wait(60) == code
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
