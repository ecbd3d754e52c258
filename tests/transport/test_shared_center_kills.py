"""The parameter server when ranks die or stop: the center is whole, the lock opens by itself or names its holder."""

import signal
import time

import numpy as np
import pytest

from choros.algorithms import DOWNPOUR
from choros.comm.shm import robust_lock
from choros.comm.shm.group_header import abort
from choros.errors import CommTimeoutError, PeerLostError
from choros.param_server.rule_blocks import BLOCK
from choros.param_server.shared_memory import SharedMemoryParameterServer

NONE = np.zeros(0)


def a_center(count=5, workers=2):
    return SharedMemoryParameterServer.create(np.zeros(count), NONE, (), workers)


KILLER = """
from choros.algorithms import DOWNPOUR

class Killer(DOWNPOUR):
    def merge(self, center, message, info, memory):
        Killer.calls += len(center) > 0  # a stand-in has no length: this rule is called as it is
        if Killer.calls == BLOCKS * 3 + 2:  # in the fourth exchange, when one block is already written
            say(killed=True)
            os.kill(os.getpid(), HOW)
        return super().merge(center, message, info, memory)

Killer.calls = 0
"""


def holding(does):
    """The script of a rank that does something while it holds the lock, in its fourth exchange."""
    killer = KILLER.replace("BLOCKS", "1").replace("+ 2", "+ 1").replace("os.kill(os.getpid(), HOW)", does)
    return (
        killer
        + """
center = SharedMemoryParameterServer(fd, Killer(), rank, size, timeout=30)
for _ in range(4):
    center.exchange(np.ones(5), np.zeros(5), 1, np.zeros(0))
say(ended=center.clock)
"""
    )


def test_a_kill_in_the_middle_of_a_merge_leaves_the_center_whole_and_the_others_go_on(ranks):
    count = 3 * BLOCK
    script = (
        KILLER.replace("BLOCKS", "3").replace("HOW", "signal.SIGKILL")
        + f"""
count = {count}
center = SharedMemoryParameterServer(fd, Killer() if rank == 1 else DOWNPOUR(), rank, size, timeout=30)
local, seen, none = np.zeros(count), np.zeros(count), np.zeros(0)
center.read(local, none)
seen[:] = local
turns = 0
end = time.monotonic() + 1.5
while turns < 8 or time.monotonic() < end:
    local += 1
    center.exchange(local, seen, 1, none)
    turns += 1
say(turns=turns, equal=bool(local.min() == local.max()))
"""
    )
    with a_center(count, workers=3) as segment:
        results = ranks.start(script, segment, 3).finish(codes={1: -signal.SIGKILL})
        with SharedMemoryParameterServer(segment) as controller:
            out = np.empty(count)
            clock = controller.read(out, NONE)
            contributions = controller.contributions
    assert results[1] == [{"killed": True}]
    assert contributions == [results[0][0]["turns"], 3, results[2][0]["turns"]]
    assert contributions[0] > 5 < contributions[2]
    assert results[0][0]["equal"]
    assert results[2][0]["equal"]
    assert clock == sum(contributions)
    assert out.min() == out.max() == clock  # each contribution added one to every value, once


def test_the_center_is_read_after_every_worker_was_killed(ranks):
    script = """
from choros.algorithms import DOWNPOUR

center = SharedMemoryParameterServer(fd, DOWNPOUR(), rank, size, timeout=30)
local, seen, none = np.zeros(200_000), np.zeros(200_000), np.zeros(0)
turn = 0
while True:
    local += 1
    center.exchange(local, seen, 1, none)
    turn += 1
    if turn == 20:
        say(going=True)
"""
    with a_center(200_000) as segment:
        ranks.start(script, segment, 2)
        for rank in range(2):
            ranks.next_line(rank)
        with SharedMemoryParameterServer(segment, None, None, 2) as controller:
            out = np.empty(200_000)
            clocks = [controller.read(out, NONE)]
            for _ in range(50):  # while they contend
                clocks.append(controller.read(out, NONE))
                assert out.min() == out.max() == clocks[-1]
            for rank in range(2):
                ranks.kill(rank)
            ranks.finish(codes={0: -signal.SIGKILL, 1: -signal.SIGKILL})
            clock = controller.read(out, NONE)
            assert clocks == sorted(clocks)
            assert out.min() == out.max() == clock == sum(controller.contributions) >= 40


def test_a_stopped_holder_is_named_and_the_center_can_still_be_read(ranks):
    with a_center() as segment:
        ranks.start(holding("os.kill(os.getpid(), signal.SIGSTOP)"), segment, 2, ranks=[1])
        assert ranks.next_line(0) == {"killed": True}
        client = SharedMemoryParameterServer(segment, DOWNPOUR(), 0, 2, timeout=0.6)
        begin = time.perf_counter()
        with pytest.raises(CommTimeoutError, match=r"rank 0 on .* held by rank 1 \(process \d+\)") as caught:
            client.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert 0.6 <= time.perf_counter() - begin < 5
        assert caught.value.missing == (1,)
        out = np.empty(5)
        assert client.read(out, NONE, adopt=True) == 3
        assert out.tolist() == [3.0] * 5
        ranks.kill(0, signal.SIGCONT)
        assert ranks.finish() == [[{"ended": 4}]]
        assert client.exchange(np.ones(5), np.zeros(5), 1, NONE) == 1  # it adopted clock 3


def test_a_holder_without_a_rank_and_one_that_has_just_gone_are_no_rank_of_the_job(ranks, monkeypatch):
    script = """
controller = SharedMemoryParameterServer(fd)
with controller._lock.hold(30, "a test"):
    say(held=True)
    time.sleep(60)
"""
    with a_center() as segment:
        ranks.start(script, segment, 2, ranks=[1])
        assert ranks.next_line(0) == {"held": True}
        client = SharedMemoryParameterServer(segment, DOWNPOUR(), 0, 2, timeout=0.1)
        with pytest.raises(CommTimeoutError, match=r"held by a process without a rank \(process \d+\)") as caught:
            client.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert caught.value.missing == ()
        monkeypatch.setattr(robust_lock, "holder", lambda fd, byte: 0)  # released after this process has tried
        with pytest.raises(CommTimeoutError, match="has just released it or died") as caught:
            client.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert caught.value.missing == ()
        ranks.kill(0)
        ranks.finish(codes={0: -signal.SIGKILL})


def test_a_killed_holder_lets_the_lock_go_at_once(ranks):
    with a_center() as segment:
        ranks.start(holding("time.sleep(60)"), segment, 2, ranks=[1])
        assert ranks.next_line(0) == {"killed": True}
        client = SharedMemoryParameterServer(segment, DOWNPOUR(), 0, 2, timeout=20)
        ranks.kill(0)
        begin = time.perf_counter()
        assert client.exchange(np.ones(5), np.zeros(5), 1, NONE) == 3
        assert time.perf_counter() - begin < 5
        ranks.finish(codes={0: -signal.SIGKILL})


def test_an_abort_ends_the_wait_for_the_lock(ranks):
    script = """
from choros.algorithms import DOWNPOUR

center = SharedMemoryParameterServer(fd, DOWNPOUR(), rank, size, timeout=60)
say(ready=True)
trying(lambda: center.exchange(np.ones(5), np.zeros(5), 1, np.zeros(0)))
say(at=time.time())
"""
    with a_center() as segment:
        holder = SharedMemoryParameterServer(segment, DOWNPOUR(), 0, 2)
        with holder._lock.hold(5, "a test"):
            ranks.start(script, segment, 2, ranks=[1])
            ranks.next_line(0)
            time.sleep(0.3)
            given_up = time.time()
            abort(segment, "rank 0 ran out of memory")
            error, after = ranks.finish()[0]
        assert error["error"] == "PeerLostError"
        assert "rank 1 on" in error["text"]
        assert "rank 0 ran out of memory" in error["text"]
        assert after["at"] - given_up < 5
        with pytest.raises(PeerLostError, match="aborted before an exchange"):
            holder.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert holder.read(np.empty(5), NONE) == 0
