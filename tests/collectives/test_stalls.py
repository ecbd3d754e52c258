"""A rank that waits too long says so once, by the call's name and with what those who are missing did last."""

import os
import re
import signal

import pytest

from choros.comm.shm.group import SharedGroup

HEAD = """
import io
from choros.comm.collectives import *
from choros.comm.tracing import TracedOperation
group = SharedGroup(fd, rank, timeout=20)
c = Collectives(group)
x = np.ones(3, "float32")
host = os.uname().nodename

def heard(call):
    sys.stderr = io.StringIO()
    call()
    lines, sys.stderr = sys.stderr.getvalue().splitlines(), sys.__stderr__
    say(lines=[line.replace(host, "HOST") for line in lines])
"""


@pytest.fixture
def run(ranks):
    def start(size, script):
        with SharedGroup.create(size, 1 << 16) as segment:
            return ranks.start(HEAD + script, segment, size).finish()

    return start


def test_a_wait_is_told_once_and_goes_on(run):
    script = """
c.allreduce(x, SUM, name="before")
heard(lambda: (time.sleep(0.9 * (rank == 1)), c.barrier()))  # nobody asked for it
group.warn_after = 0.3
for name in ("loss", "again"):
    heard(lambda: (time.sleep(0.9 * (rank == 1)), c.allreduce(x, SUM, name=name)))
def step():
    time.sleep(0.9 * (rank == 1))
    with TracedOperation(group, "step", "gradients of model"):
        group.sum_slots(5, "float32")
heard(step)
def late():  # within a call: it said what it does, and has not done it
    if rank == 1:
        group.doing = "a long way"
        time.sleep(0.9)
    group.barrier()
heard(late)
"""
    zero, rank_1, two = ([line["lines"] for line in lines] for lines in run(3, script))
    assert rank_1 == [[], [], [], [], []]
    for rank, lines in ((0, zero), (2, two)):
        assert [len(each) for each in lines] == [0, 1, 1, 1, 1]
        known, repeated, step, late = (re.sub(r"\d\.\d s|process \d+, \w+", "...", line) for (line,) in lines[1:])
        message = f"choros: rank {rank} on HOST has waited ... at allreduce 'loss' of float32 (3,) by Sum for rank 1 "
        message += "(alive, but busy or stopped) of 3. Rank 1 (...): its last call, barrier, ended ... ago. "
        assert known == message + "It waits for up to 20 s in all."
        assert "at allreduce 'again'" in repeated
        assert "its last call, allreduce 'loss' of float32 (3,) by Sum, ended ... ago" in repeated
        assert "at gradients of model for rank 1" in step
        assert "at barrier for rank 1" in late


def test_the_limit_names_the_call_and_what_the_missing_did(ranks):
    script = """
group.warn_after, group.timeout = 0.2, 1.0
c.allreduce(x, SUM, name="before")
if rank == 1:
    group.doing = "a long way"
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.3)
trying(lambda: c.broadcast(x, 0, name="weights"))
"""
    with SharedGroup.create(3, 1 << 16) as segment:
        ranks.start(HEAD + script, segment, 3)
        messages = {rank: ranks.next_line(rank) for rank in (0, 2)}
        ranks.kill(1)
        ranks.finish(codes={1: -signal.SIGKILL})
    for rank, line in messages.items():
        assert line["error"] == "CommTimeoutError"
        assert line["missing"] == [1]
        assert 1.0 <= line["seconds"] < 10
        text = line["text"]
        assert f"rank {rank} on {os.uname().nodename} waited 1." in text
        assert "s at broadcast 'weights' of float32 (3,)" in text
        assert "from rank 0 for rank 1 (alive, but busy or stopped) of 3. Rank 1 (process" in text
        assert "stopped by a signal): it has been in a long way for " in text


def test_a_difference_below_the_collectives_is_named_too(run):
    script = """
def step():
    with TracedOperation(group, "step", "gradients of model"):
        group.sum_slots(5, "float32")
trying(step if rank else lambda: c.allreduce(x, SUM, name="loss"))
say(total=c.allreduce(x, SUM, name="after").tolist())
"""
    for line, after in run(2, script):
        assert (
            "rank 0: gather, for allreduce 'loss' of float32 (3,) by Sum; rank 1: sum_slots of 5 float32"
            in line["text"]
        )
        assert "for gradients of model" in line["text"]
        assert after == {"total": [2.0, 2.0, 2.0]}


def test_what_takes_time_is_taken_down(run):
    """A trace has each call once, with its waits and reductions inside of it."""
    script = """
c.barrier()  # the processes do not start at the same time
taken = []
group.trace = taken.append
time.sleep(0.3 * (rank == 1))
c.allreduce(x, SUM, name="sum")
c.allreduce(x, MAX, name="most")
c.allgather(x, name="rows")
group.trace = None
c.barrier()
say(taken=taken)
"""
    zero, rank_1 = (lines[0]["taken"] for lines in run(2, script))
    for taken in (zero, rank_1):
        calls = [event for event in taken if event[0] == "call"]
        assert [name for _, name, *_ in calls] == [
            "allreduce 'sum' of float32 (3,) by Sum",
            "allreduce 'most' of float32 (3,) by Max",
            "allgather 'rows' of float32 (any,)",
        ]
        assert [nbytes for *_, nbytes in calls] == [12, 12, 12]
        assert [event[4] for event in taken if event[0] == "reduce"] == [12, 12]
        for kind, _, begin, end, _ in taken:
            assert begin <= end
            inside = [1 for _, _, first, last, _ in calls if first <= begin and end <= last]
            assert len(inside) == 1, kind
    waited = [max(end - begin for kind, _, begin, end, _ in taken if kind == "wait") for taken in (zero, rank_1)]
    assert waited[0] > 0.1e9
    assert waited[1] < waited[0]
