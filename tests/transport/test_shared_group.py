"""SharedGroup between real processes: sums, mismatches, deaths, stops."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from choros.errors import BadInput, ChorosError, PeerFailed
from choros.transport import Group
from choros.transport.local_group import LocalGroup
from choros.transport.segment import Segment
from choros.transport.shared_group import SharedGroup, abort, share

SUMS = """
import hashlib
group = SharedGroup(fd, rank, timeout=60)
seen = hashlib.sha256()
for dtype in ("int8", "int32", "uint64", "float16", "float32", "float64", "complex64"):
    for count in (0, 1, 2, 17, 1000, 1 << 12, 9973):
        values = [(np.random.default_rng([r, count]).standard_normal(count) * 5).astype(dtype) for r in range(size)]
        want = values[0].copy()
        for more in values[1:]:
            want = want + more
        slot = group.slot(count, dtype)
        assert slot.ctypes.data % 64 == 0
        slot[:] = values[rank]
        got = group.sum_slots(count, dtype)
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), (dtype, count)
        assert not got.flags.writeable
        seen.update(got.tobytes())
        whole = group.sum(values[rank])
        assert whole.tobytes() == want.tobytes() and whole.flags.writeable
        seen.update(whole.tobytes())
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
for root in range(size):
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
def test_sums_are_right_and_bit_equal(ranks, size):
    with SharedGroup.create(size, 80_000) as segment:
        said = ranks.start(SUMS, segment, size).finish(120)
    digests = {lines[0]["digest"] for lines in said}
    assert len(said) == size
    assert len(digests) == 1


def test_a_fast_rank_never_overwrites_what_a_slow_one_reads(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60, spin=0.0 if rank else 50e-6)
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
    with SharedGroup.create(3, 40_000) as segment:
        assert ranks.start(script, segment, 3).finish(120) == [[{"ok": True}]] * 3


def test_calls_that_differ_are_told_to_every_rank_and_the_group_goes_on(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=30)
trying(lambda: group.sum_slots(5 if rank else 6, "float32"))
trying(lambda: group.sum(np.zeros(4, "float64" if rank else "float32")))
trying(lambda: group.barrier() if rank else group.gather(b"x"))
trying(lambda: group.broadcast(np.zeros(3), root=rank))
trying(lambda: group.barrier() if rank else group.sum(np.ones(2)))
say(total=float(group.sum(np.ones(1))[0]))
"""
    with SharedGroup.create(3, 4096) as segment:
        said = ranks.start(script, segment, 3).finish()
    for lines in said:
        assert [line["error"] for line in lines[:5]] == ["BadInput"] * 5
        for line, words in zip(
            lines,
            [
                ("rank 0: sum_slots of 6 float32", "rank 1: sum_slots of 5 float32", "rank 2: sum_slots of 5 float32"),
                ("rank 0: sum of 4 float32", "rank 2: sum of 4 float64"),
                ("rank 0: gather", "rank 1: barrier"),
                ("rank 0: broadcast of 3 float64 from rank 0", "from rank 2"),
                ("rank 0: sum of 2 float64", "rank 1: barrier"),
            ],
            strict=False,
        ):
            assert all(word in line["text"] for word in words), line["text"]
        assert lines[5] == {"total": 3.0}


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
            ranks.line(rank)
        time.sleep(0.2)
        killed = time.perf_counter()
        ranks.kill(2)
        first = [ranks.line(rank) for rank in (0, 1)]
        seconds = time.perf_counter() - killed
        said = ranks.finish(codes={2: -signal.SIGKILL})
    assert seconds < 1.0
    for rank, line in enumerate(first):
        assert line["error"] == "PeerFailed"
        assert f"rank {rank} on {os.uname().nodename}: rank 2 (process" in line["text"]
        assert "died while it was awaited at sum_slots of 10 float32" in line["text"]
        assert "failed before" in said[rank][0]["text"]


def test_a_death_is_seen_while_another_rank_is_only_slow(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
group.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    time.sleep(2)
else:
    trying(group.barrier)
"""
    with SharedGroup.create(3, 4096) as segment:
        said = ranks.start(script, segment, 3).finish(codes={2: -signal.SIGKILL})
    assert said[0][0]["error"] == "PeerFailed"
    assert said[0][0]["seconds"] < 1.0


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
            ranks.line(rank)
        ranks.kill(1, signal.SIGSTOP)
        line = ranks.line(0)
        ranks.kill(1)
    assert line["error"] == "MeetingTimeout"
    assert line["missing"] == [1, 2, 3]
    assert "rank 1 (alive, but busy or stopped) and ranks 2, 3 (never joined) of 4" in line["text"]
    assert 0.7 <= line["seconds"] < 1.5


def test_a_rank_that_left_is_named(ranks):
    script = """
group = SharedGroup(fd, rank, timeout=60)
group.barrier()
if rank == 1:
    group.close()
    time.sleep(0.5)
else:
    trying(group.barrier)
"""
    with SharedGroup.create(2, 4096) as segment:
        said = ranks.start(script, segment, 2).finish()
    assert "rank 1 (process" in said[0][0]["text"]
    assert "left while it was awaited at barrier" in said[0][0]["text"]
    assert said[0][0]["seconds"] < 1.0


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
            ranks.line(rank)
        time.sleep(0.5)
        given_up = time.time()
        abort(segment, "rank 9 raised ValueError: no rows")
        SharedGroup.abort(segment, "a second reason does not replace the first")
        said = ranks.finish()
    for lines in said:
        assert lines[0]["error"] == "PeerFailed"
        assert "rank 9 raised ValueError: no rows" in lines[0]["text"]
    assert all(lines[1]["at"] - given_up < 0.3 for lines in said[:2])


def test_a_rank_is_taken_once_and_must_exist(ranks):
    script = """
trying(lambda: SharedGroup(os.dup(fd), 0))
trying(lambda: SharedGroup(os.dup(fd), 2))
trying(lambda: SharedGroup(os.dup(fd), -1))
trying(lambda: SharedCentre(os.dup(fd)))
"""
    with SharedGroup.create(2, 4096) as segment, SharedGroup(segment, 0):
        (lines,) = ranks.start(script, segment, 1).finish()
        with pytest.raises(BadInput, match="already taken"):
            SharedGroup(segment, 0)
    assert [line["error"] for line in lines] == ["BadInput"] * 4
    assert f"already taken by process {os.getpid()}" in lines[0]["text"]
    assert "give 0 to 1" in lines[1]["text"]
    assert "holds a SharedGroup's segment, and a SharedCentre's was expected" in lines[3]["text"]


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
        said = ranks.start(script, segment, 2).finish()
    assert all(line["after"] == line["before"] - 1 for (line,) in said)


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
        said = ranks.start(script, segment, 3).finish()
    for rank, (line, refused) in enumerate(said):
        assert line == {"values": [10, 11, 12], "same": rank == root}
        assert refused["error"] == "PeerFailed"
        assert "gave no segment" in refused["text"]


class _Telling(LocalGroup):
    """A group of two of whom the other says that its segment is one of a process that has gone."""

    def __init__(self, pid):
        super().__init__()
        self.rank, self.size, self.pid = 1, 2, pid
        self.gathered = []

    def gather(self, x):
        self.gathered.append(x)
        return [json.dumps([self.pid, 3]).encode() if len(self.gathered) == 1 else b"", x]


def test_a_segment_that_cannot_be_mapped_is_told_to_everyone():
    group = _Telling(2**22 + 5)
    with pytest.raises(PeerFailed, match="not mapped everywhere"):
        share(group, None)
    assert b"cannot map" in group.gathered[1]


def test_what_cannot_be_summed_or_sent_is_refused():
    with SharedGroup.create(1, 4096) as segment, SharedGroup(segment, 0) as group:
        assert isinstance(group, Group)
        assert group.slot_bytes == 4096
        for values in (np.zeros(3, bool), np.array(["a"]), np.array([object()])):
            with pytest.raises(BadInput, match="cannot be summed"):
                group.sum(values)
        with pytest.raises(BadInput, match="slot_bytes=4100"):
            group.slot(1025, "float32")
        with pytest.raises(BadInput, match="objects"):
            group.broadcast(np.array([object()]))
        with pytest.raises(BadInput, match="give 0 to 0"):
            group.broadcast(np.zeros(1), root=1)
        assert group.sum(np.float32([1.5, np.inf])).tolist() == [1.5, np.inf]
        for count in range(40):  # more kinds of slots than are remembered
            assert group.slot(count, "float32").size == count
    for size, room in ((0, 10), (2, -1)):
        with pytest.raises(BadInput, match="cannot be"):
            SharedGroup.create(size, room)
    with Segment.create(4096) as plain:
        with pytest.raises(BadInput, match="holds no segment, and a SharedGroup's was expected"):
            SharedGroup(plain, 0)
        with pytest.raises(BadInput, match="nothing to give up"):
            abort(plain, "x")


def test_local_group_gives_what_a_shared_group_of_one_gives():
    local = LocalGroup()
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
    given = np.ones(2)
    assert local.sum(given) is not given
    assert local.slot(3, "float32").ctypes.data % 64 == 0
    with pytest.raises(ChorosError):
        local.slot(-1, "float32")
    with pytest.raises(BadInput):
        local.broadcast(given, root=1)
    local.close()
