"""SharedGroup between real processes: deaths, stops, what is shared; what all groups give is in ``test_groups``."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from choros.comm.group import Group
from choros.comm.host_identity import oversubscribed
from choros.comm.shm import group_header
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group import SharedGroup, abort, share
from choros.comm.shm.robust_lock import RobustLock
from choros.comm.shm.segment import Segment
from choros.comm.single_rank_group import SingleRankGroup
from choros.errors import ChorosError, CommTimeoutError, InvalidInputError, PeerLostError


def test_a_killed_rank_is_named_within_a_second(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
group.barrier()
say(ready=True)
if rank == 2:
    time.sleep(60)
trying(lambda: group.sum_slots(10, "float32"))
trying(group.barrier)
"""
    with SharedGroup.create(3, 4096) as segment:
        ranks.start(script, segment, 3)
        for rank in range(3):
            ranks.next_line(rank)
        time.sleep(0.2)
        killed = time.perf_counter()
        ranks.kill(2)
        first = [ranks.next_line(rank) for rank in (0, 1)]
        seconds = time.perf_counter() - killed
        results = ranks.finish(codes={2: -signal.SIGKILL})
    assert seconds < 5
    for rank, line in enumerate(first):
        assert line["error"] == "PeerLostError"
        assert f"rank {rank} on {os.uname().nodename}: rank 2 (process" in line["text"]
        assert "died while it was awaited at sum_slots of 10 float32" in line["text"]
        assert "failed before" in results[rank][0]["text"]


def test_a_death_is_seen_while_another_rank_is_only_slow(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
group.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    time.sleep(3)
else:
    trying(group.barrier)
"""
    with SharedGroup.create(3, 4096) as segment:
        results = ranks.start(script, segment, 3).finish(codes={2: -signal.SIGKILL})
    assert results[0][0]["error"] == "PeerLostError"
    assert results[0][0]["seconds"] < 2.5


def test_a_stopped_rank_and_one_that_never_came_are_named(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
say(ready=True)
if rank == 1:
    time.sleep(60)
time.sleep(0.5)
group.timeout = 0.7
trying(group.barrier)
"""
    with SharedGroup.create(4, 4096) as segment:
        ranks.start(script, segment, 4, ranks=[0, 1])
        for rank in (0, 1):
            ranks.next_line(rank)
        ranks.kill(1, signal.SIGSTOP)
        line = ranks.next_line(0)
        ranks.kill(1)
    assert line["error"] == "CommTimeoutError"
    assert line["missing"] == [1, 2, 3]
    assert "rank 1 (alive, but busy or stopped) and ranks 2, 3 (never joined) of 4" in line["text"]
    assert 0.7 <= line["seconds"] < 5


def test_an_abort_wakes_all_who_wait(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
say(ready=True)
if rank == 2:
    time.sleep(1.5)
trying(group.barrier)
say(at=time.time())
"""
    with SharedGroup.create(3, 4096) as segment:
        ranks.start(script, segment, 3)
        for rank in range(3):
            ranks.next_line(rank)
        time.sleep(0.5)
        given_up = time.time()
        abort(segment, "rank 9 raised ValueError: no rows")
        SharedGroup.abort(segment, "a second reason does not replace the first")
        results = ranks.finish()
    for lines in results:
        assert lines[0]["error"] == "PeerLostError"
        assert "rank 9 raised ValueError: no rows" in lines[0]["text"]
    assert all(lines[1]["at"] - given_up < 5 for lines in results[:2])


def test_a_rank_is_taken_once_and_must_exist(ranks):
    script = """
trying(lambda: SharedGroup(os.dup(fd), 0))
trying(lambda: SharedGroup(os.dup(fd), 2))
trying(lambda: SharedGroup(os.dup(fd), -1))
trying(lambda: SharedMemoryParameterServer(os.dup(fd)))
"""
    with SharedGroup.create(2, 4096) as segment, SharedGroup(segment, 0):
        (lines,) = ranks.start(script, segment, 1).finish()
        with pytest.raises(InvalidInputError, match="already taken"):
            SharedGroup(segment, 0)
    assert [line["error"] for line in lines] == ["InvalidInputError"] * 4
    assert f"already taken by process {os.getpid()}" in lines[0]["text"]
    assert "give 0 to 1" in lines[1]["text"]
    assert "holds a SharedGroup's segment, and a parameter server's was expected" in lines[3]["text"]


def test_a_rank_closes_every_descriptor(ranks):
    script = """
def open_fds():
    return sorted(os.listdir("/proc/self/fd"))
before = open_fds()
with SharedGroup(fd, rank, timeout=30) as group:
    group.sum(np.ones(10))
    result = group.sum_slots(4, "float32")
    group.barrier()
after = open_fds()
say(before=len(before), after=len(after), still=float(result.sum()))
"""
    with SharedGroup.create(2, 4096) as segment:
        results = ranks.start(script, segment, 2).finish()
    assert all(line["after"] == line["before"] - 1 for (line,) in results)


def test_ranks_in_threads_of_one_process():
    results = [None] * 3

    def work(rank):
        with SharedGroup(segment, rank, timeout=30) as group:
            time.sleep(0.1 * rank)
            results[rank] = group.sum(np.full(5, rank + 1.0)).tolist()
            group.barrier()

    with SharedGroup.create(3, 4096) as segment:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == [[6.0] * 5] * 3


def test_what_the_others_wrote_is_read_after_a_fence_also_by_the_last_to_come(monkeypatch):
    fences = []
    with SharedGroup.create(2, 4096) as segment, SharedGroup(segment, 0) as first, SharedGroup(segment, 1) as last:
        early = threading.Thread(target=first.barrier)
        early.start()
        while segment.words[group_header.RECORDS] < 1:
            time.sleep(0.001)
        monkeypatch.setattr(group_header, "fence", lambda: fences.append(threading.current_thread().name))
        last.barrier()
        early.join()
    assert threading.current_thread().name in fences


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize("many", [False, True])
def test_ranks_do_not_spin_where_they_outnumber_the_cores_they_may_use(many):
    usable = os.sched_getaffinity(0)
    size = 2 if many else 1
    os.sched_setaffinity(0, {min(usable)})  # this machine may have more, which do not count
    try:
        assert oversubscribed([os.getpid()] * size) is many
        with SharedGroup.create(size, 4096) as segment:
            groups = [SharedGroup(segment, rank) for rank in range(size)]
            threads = [threading.Thread(target=group.barrier) for group in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [group._header.waiter.spin for group in groups] == [0.0 if many else SPIN] * size
            for group in groups:
                group.close()
    finally:
        os.sched_setaffinity(0, usable)


def test_an_interrupt_right_after_the_lock_was_taken_lets_it_go(monkeypatch):
    with Segment.create(4096) as segment:
        lock = RobustLock(segment, 40, 41, "rank 0", 0)
        acquire = lock._acquire

        def interrupted(timeout, kind):
            acquire(timeout, kind)
            raise KeyboardInterrupt

        monkeypatch.setattr(lock, "_acquire", interrupted)
        with pytest.raises(KeyboardInterrupt), lock.hold(1.0, "an exchange"):
            pass
        held = f"import fcntl; fcntl.lockf({segment.fd}, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, {1 << 30})"
        subprocess.run([sys.executable, "-c", held], pass_fds=[segment.fd], check=True)
        monkeypatch.undo()
        with lock.hold(1.0, "an exchange"):
            assert segment.words[41] == 1


class _Interrupted:
    """A thread lock of which an interrupt comes as soon as it is acquired, once."""

    def __init__(self, lock):
        self.lock, self.release, self.comes = lock, lock.release, True

    def acquire(self, *args, **kwargs):
        taken = self.lock.acquire(*args, **kwargs)
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt
        return taken


def test_an_interrupt_right_after_the_thread_lock_was_taken_lets_it_go():
    with Segment.create(4096) as segment:
        lock = RobustLock(segment, 40, 41, "rank 0", 0)
        segment.lock = _Interrupted(segment.lock)
        with pytest.raises(KeyboardInterrupt), lock.hold(1.0, "an exchange"):
            pass
        taken = []

        def other():
            with lock.hold(1.0, "an exchange"):
                taken.append(segment.words[41])

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert taken == [1]


def test_a_thread_that_waits_in_vain_leaves_the_lock_to_the_one_that_has_it():
    held = f"import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, {1 << 30})"
    with Segment.create(4096) as segment, RobustLock(segment, 40, 41, "rank 0", 0).hold(1.0, "an exchange"):
        failures = []

        def other():
            try:
                with RobustLock(segment, 40, 41, "rank 0", 0).hold(0.1, "an exchange"):
                    pass
            except CommTimeoutError as error:
                failures.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(failures) == 1
        assert segment.words[41] == 1
        tried = [sys.executable, "-c", held, str(segment.fd)]
        assert subprocess.run(tried, pass_fds=[segment.fd], stderr=subprocess.DEVNULL).returncode  # it is locked


@pytest.mark.parametrize("root", [0, 1])
def test_a_segment_is_shared_with_ranks_that_did_not_inherit_it(ranks, root):
    script = f"""
group = SharedGroup(fd, rank, timeout=30)
root = {root}
made = Segment.create(4096, "late") if rank == root else None
late = share(group, made, root)
late.array("int64", size)[rank] = rank + 10
group.barrier()
say(values=late.array("int64", size).tolist(), same=late is made)
trying(lambda: share(group, None, root))
group.close()
"""
    with SharedGroup.create(3, 4096) as segment:
        results = ranks.start(script, segment, 3).finish()
    for rank, (line, refused) in enumerate(results):
        assert line == {"values": [10, 11, 12], "same": rank == root}
        assert refused["error"] == "PeerLostError"
        assert "gave no segment" in refused["text"]


class _Telling(SingleRankGroup):
    """A group of two of whom the other says that its segment is one of a process that has gone."""

    def __init__(self, pid):
        super().__init__()
        self.rank, self.size, self.pid = 1, 2, pid
        self.gathered = []

    def gather(self, x):
        self.gathered.append(x)
        settings = json.dumps([json.loads(x)[0], [self.pid, 3]]).encode() if len(self.gathered) == 1 else b""
        return [settings, x]


def test_a_segment_that_cannot_be_mapped_is_told_to_everyone():
    group = _Telling(2**22 + 5)
    with pytest.raises(PeerLostError, match="not mapped everywhere"):
        share(group, None)
    assert b"cannot map" in group.gathered[1]


def test_ranks_of_several_machines_cannot_share_memory():
    group = _Telling(1)
    group.gather = lambda x: [json.dumps(["elsewhere 7", [1, 3]]).encode(), x]
    with pytest.raises(InvalidInputError, match=f"rank 0 on elsewhere, rank 1 on {os.uname().nodename}"):
        share(group, None)


def test_what_cannot_be_summed_or_sent_is_refused():
    with SharedGroup.create(1, 4096) as segment, SharedGroup(segment, 0) as group:
        assert isinstance(group, Group)
        assert group.slot_bytes == 4096
        for values in (np.zeros(3, bool), np.array(["a"]), np.array([object()])):
            with pytest.raises(InvalidInputError, match="cannot be summed"):
                group.sum(values)
        with pytest.raises(InvalidInputError, match="slot_bytes=4100"):
            group.slot(1025, "float32")
        with pytest.raises(InvalidInputError, match="objects"):
            group.broadcast(np.array([object()]))
        with pytest.raises(InvalidInputError, match="give 0 to 0"):
            group.broadcast(np.zeros(1), root=1)
        assert group.sum(np.float32([1.5, np.inf])).tolist() == [1.5, np.inf]
        for count in range(40):  # more kinds of slots than are remembered
            assert group.slot(count, "float32").size == count
    for size, room in ((0, 10), (2, -1)):
        with pytest.raises(InvalidInputError, match="cannot be"):
            SharedGroup.create(size, room)
    with Segment.create(4096) as plain:
        with pytest.raises(InvalidInputError, match="holds no segment, and a SharedGroup's was expected"):
            SharedGroup(plain, 0)
        with pytest.raises(InvalidInputError, match="nothing to abort"):
            abort(plain, "x")


def test_local_group_gives_what_a_shared_group_of_one_gives():
    local = SingleRankGroup()
    assert isinstance(local, Group)
    with SharedGroup.create(1, 4096) as segment, SharedGroup(segment, 0) as shared:
        for group in (local, shared):
            slot = group.slot(7, "float64")
            slot[:] = range(7)
            assert group.sum_slots(7, "float64").tolist() == list(range(7))
            assert not group.sum_slots(7, "float64").flags.writeable
            assert group.gather(b"ab") == [b"ab"]
            assert group.broadcast(np.arange(3)).tolist() == [0, 1, 2]
            group.barrier()
        for x in (np.arange(5, dtype="uint8"), np.ones((2, 3), "float16"), np.float64(3), np.zeros(0, "float32")):
            for name in ("sum", "mean"):
                a, b = getattr(local, name)(x), getattr(shared, name)(x)
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    inputs = np.ones(2)
    assert local.sum(inputs) is not inputs
    assert local.slot(3, "float32").ctypes.data % 64 == 0
    with pytest.raises(ChorosError):
        local.slot(-1, "float32")
    with pytest.raises(InvalidInputError):
        local.broadcast(inputs, root=1)
    local.close()
