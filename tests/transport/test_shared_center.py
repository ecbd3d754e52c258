"""SharedMemoryParameterServer between real processes: conservation, what an exchange does, what is refused."""

import inspect
import os

import numpy as np
import pytest

from choros.algorithms import DynSGD
from choros.comm.group import ParameterServer
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError
from choros.param_server.layout import ACTIVE
from choros.param_server.rule_blocks import BLOCK
from choros.param_server.shared_memory import SharedMemoryParameterServer

NONE = np.zeros(0)


class Rule:
    shows, elementwise = "after", True

    def propose(self, local, seen, window):
        return local - seen

    def merge(self, center, message, info, memory):
        return center + message, memory

    def adopt(self, local, shown):
        return shown


class Elastic(Rule):
    shows, uses_seen = "before", False

    def propose(self, local, seen, window):
        return local

    def merge(self, center, message, info, memory):
        return center + 0.25 * (message - center), memory

    def adopt(self, local, shown):
        return local - 0.25 * (local - shown)


class Whole(Rule):
    elementwise = False

    def merge(self, center, message, info, memory):
        norm = float((center * center).sum())
        actual = tuple(center if i == info.sender else vector for i, vector in enumerate(memory))
        return center + message / (norm + info.staleness + 1), actual


RULES = "\n\n".join(inspect.getsource(rule) for rule in (Rule, Elastic, Whole))


def a_center(count=5, memory=0, workers=2, others=0):
    return SharedMemoryParameterServer.create(
        np.zeros(count), np.zeros(others), tuple(np.zeros(count) for _ in range(memory)), workers
    )


@pytest.mark.parametrize("count", [1, 3000, 2 * BLOCK + 17])
def test_contended_exchanges_lose_and_repeat_nothing(ranks, count):
    """Law 2: what was contributed is the center less its start; whole numbers in float64 are exact."""
    script = f"""
{RULES}
count, turns = {count}, {400 if count <= 3000 else 60}
center = SharedMemoryParameterServer(fd, Rule(), rank, size, timeout=60)
rng = np.random.default_rng(rank)
local, none = np.empty(count), np.zeros(0)
center.read(local, none)
seen, sent, stale = local.copy(), np.zeros(count), 0
for turn in range(turns):
    delta = rng.integers(-1000, 1000, count).astype(float)
    local += delta
    sent += delta
    stale += center.exchange(local, seen, 1, none)
    assert np.array_equal(local, seen)
say(sums=[float(sent.sum()), float(sent[0]), float(sent[-1])], stale=stale)
center.close()
"""
    start = np.arange(count, dtype=float)
    with SharedMemoryParameterServer.create(start, NONE, (), 3) as segment:
        results = ranks.start(script, segment, 3).finish(120)
        with SharedMemoryParameterServer(segment) as controller:
            out = np.empty(count)
            clock = controller.read(out, NONE)
            turns = clock // 3
            assert controller.contributions == [turns] * 3
            assert controller.clock == clock == 3 * turns > 0
    moved = out - start
    totals = [sum(line["sums"][i] for (line,) in results) for i in range(3)]
    assert [float(moved.sum()), float(moved[0]), float(moved[-1])] == totals
    # each merge is stale by the merges of others since its sender last saw the center
    assert 0 <= sum(line["stale"] for (line,) in results) <= 2 * clock


@pytest.mark.parametrize("kind", [Rule, Elastic, Whole])
def test_an_exchange_does_what_the_three_functions_say(kind):
    rule = kind()
    count, rng = BLOCK + 100, np.random.default_rng(0)
    center, memory = rng.standard_normal(count), [rng.standard_normal(count) for _ in range(2)]
    with SharedMemoryParameterServer.create(center, NONE, tuple(memory), 2) as segment:
        clients = [SharedMemoryParameterServer(segment, rule, rank, 2) for rank in range(2)]
        controller = SharedMemoryParameterServer(segment)
        assert all(isinstance(client, ParameterServer) for client in clients)
        views = [(rng.standard_normal(count), center.copy()) for _ in range(2)]
        last = [0, 0]
        for clock, sender in enumerate((0, 1, 1, 0, 1)):
            local, seen = views[sender]
            facts = type("M", (), {"workers": 1, "sender": sender, "staleness": clock - last[sender]})
            message = rule.propose(local.copy(), seen.copy(), 4)
            old = center
            center, saved = rule.merge(old, message, facts, tuple(memory))
            memory = list(saved)
            shown = old if rule.shows == "before" else center
            want = rule.adopt(local.copy(), shown)
            want_seen = shown if getattr(rule, "uses_seen", True) else seen.copy()
            stale = clients[sender].exchange(local, seen, 4, NONE)
            assert stale == facts.staleness
            last[sender] = clock + 1
            assert np.array_equal(local, want)
            assert np.array_equal(seen, want_seen)
            out = np.empty(count)
            assert controller.read(out, NONE) == clock + 1
            assert np.array_equal(out, center)
            header = clients[0]._header()
            for i in range(2):
                assert np.array_equal(clients[0]._buffers[2 + i][header[ACTIVE + 2 + i]], memory[i])


def test_only_the_memory_that_changed_is_rewritten():
    class Late:
        """Memory 1 changes only from the second block on, memory 0 never, memory 2 in the first block."""

        shows, elementwise = "after", True

        def __init__(self):
            self.block = -1

        def propose(self, local, seen, window):
            self.block += len(local) > 0  # a stand-in has no length: this rule is called as it is
            return local

        def merge(self, center, message, info, memory):
            first = memory[1] + 1 if self.block else memory[1]
            two = memory[2] if self.block else memory[2] + 1
            return message, (memory[0], first, two)

        def adopt(self, local, shown):
            return shown

    count = 2 * BLOCK + 5
    start = tuple(np.full(count, float(i)) for i in range(3))
    with SharedMemoryParameterServer.create(np.zeros(count), NONE, start, 1) as segment:
        client = SharedMemoryParameterServer(segment, Late(), 0, 1)
        client.exchange(np.ones(count), np.zeros(count), 1, NONE)
        assert client._header()[ACTIVE : ACTIVE + 5].tolist() == [1, 0, 0, 1, 1]
        assert np.array_equal(client._buffers[2][0], start[0])
        assert np.array_equal(client._buffers[3][1], np.r_[np.full(BLOCK, 1.0), np.full(count - BLOCK, 2.0)])
        assert np.array_equal(client._buffers[4][1], np.r_[np.full(BLOCK, 3.0), np.full(count - BLOCK, 2.0)])


def test_a_rule_cannot_write_into_the_center():
    class Vandal(Rule):
        def merge(self, center, message, info, memory):
            center[0] = 1
            return center, memory

    with a_center() as segment:
        client = SharedMemoryParameterServer(segment, Vandal(), 0, 2)
        with pytest.raises(ValueError, match="read-only"):
            client.exchange(np.ones(5), np.zeros(5), 1, NONE)
        out = np.empty(5)
        assert client.read(out, NONE) == 0
        assert out.tolist() == [0] * 5
        with SharedMemoryParameterServer(segment, Rule(), 1, 2) as other:  # the lock was let go
            assert other.exchange(np.ones(5), np.zeros(5), 1, NONE) == 0


def test_moving_statistics_are_averaged_and_adopted():
    rule = Rule()
    with SharedMemoryParameterServer.create(np.zeros(2), np.full(3, 4.0, "float32"), (), 4) as segment:
        client = SharedMemoryParameterServer(segment, rule, 0, 4)
        others = np.full(3, 8.0, "float32")
        client.exchange(np.zeros(2), np.zeros(2), 1, others)
        assert others.tolist() == [5.0] * 3
        out, read = np.empty(2), np.empty(3, "float32")
        client.read(out, read)
        assert read.tolist() == [5.0] * 3
        client.replace(np.full(2, 7.0), np.full(3, 9.0, "float32"))
        assert client.read(out, read) == 1
        assert (out.tolist(), read.tolist()) == ([7.0] * 2, [9.0] * 3)
        assert client.contributions == [1, 0, 0, 0]
    with SharedMemoryParameterServer.create(np.zeros(2), np.full(1, 0.1), (), 1) as segment:
        alone = np.array([0.7])
        SharedMemoryParameterServer(segment, rule, 0, 1).exchange(np.zeros(2), np.zeros(2), 1, alone)
        assert alone.tolist() == [0.7]  # one worker: to the last bit


def test_a_center_that_was_set_is_taken_as_it_is():
    rule = Rule()
    with a_center() as segment:
        first, two = (SharedMemoryParameterServer(segment, rule, rank, 2) for rank in range(2))
        local, seen = np.ones(5), np.zeros(5)
        two.exchange(local.copy(), seen.copy(), 1, NONE)
        SharedMemoryParameterServer(segment).replace(np.full(5, 7.0), NONE)
        for client in (first, two):
            actual, known = local.copy(), seen.copy()
            assert client.exchange(actual, known, 1, NONE) == 0
            assert actual.tolist() == known.tolist() == [7.0] * 5
        assert first.contributions == [0, 1]  # what had been learnt before went into nothing
        assert first.exchange(actual, known, 1, NONE) == 0
        late = SharedMemoryParameterServer(segment, rule, 1, 2)
        late.replace(np.full(5, 9.0), NONE)
        late.read(actual, NONE, adopt=True)
        assert late.exchange(actual, known, 1, NONE) == 0
        assert late.contributions == [1, 2]


def test_staleness_counts_from_the_adopted_read_and_then_from_the_last_exchange():
    rule = Rule()
    with a_center(workers=3) as segment:
        first, two, late = (SharedMemoryParameterServer(segment, rule, rank, 3) for rank in range(3))
        local, seen, out = np.zeros(5), np.zeros(5), np.empty(5)
        assert [first.exchange(local, seen, 1, NONE) for _ in range(4)] == [0, 0, 0, 0]
        assert two.exchange(local, seen, 1, NONE) == 4
        late.read(out, NONE, adopt=True)
        assert late.exchange(local, seen, 1, NONE) == 0
        first.read(out, NONE)  # for a callback; the worker trains on from its own weights
        assert first.exchange(local, seen, 1, NONE) == 2
        assert first.contributions == [5, 1, 1]


def test_pending_messages_take_no_memory_before_they_are_written():
    """Of each rank that is a whole vector, and most runs never write one."""
    count, workers = 1 << 14, 4
    with a_center(count, workers=workers) as segment:
        servers = [SharedMemoryParameterServer(segment, Rule(), rank) for rank in range(workers)]
        allocated = 512 * os.fstat(segment.fd).st_blocks
        assert allocated < 3 * 8 * count, f"{allocated / (8 * count):.1f} vectors: the center has two buffers"
        servers[0].publish_pending(np.ones(count), np.zeros(count), 1, NONE)
        assert 512 * os.fstat(segment.fd).st_blocks >= allocated + 8 * count


def test_a_trial_takes_no_message_that_was_written_after_its_copy_of_the_center(monkeypatch):
    """The worker exchanges and writes a newer message between the trial's check of the old one and its copy of it."""
    with a_center(1) as segment:
        reader, writer = (SharedMemoryParameterServer(segment, DynSGD(), rank) for rank in (0, 1))
        local, seen = np.full(1, 3.0), np.zeros(1)
        writer.publish_pending(local, seen, 1, NONE)
        check, checks = reader._pending_is_valid, []

        def check_then_write(header, rank):
            valid = check(header, rank)
            checks.append((rank, valid))
            if valid and checks.count((1, True)) == 2:  # the first is made under the lock, with the copy of the center
                writer.exchange(local, seen, 1, NONE)
                writer.publish_pending(local + 4.0, seen, 1, NONE)
            return valid

        monkeypatch.setattr(reader, "_pending_is_valid", check_then_write)
        out = np.empty(1)
        reader.trial(out, NONE)
        assert checks.count((1, True)) == 2
        assert out.tolist() == [0.0]  # the center of the copy, whose message is in the newer center
        reader.trial(out, NONE)
        assert out.tolist() == [7.0]


def test_a_rank_may_come_back_but_not_twice_at_once():
    rule = Rule()
    with a_center() as segment:
        first = SharedMemoryParameterServer(segment, rule, 0, 2)
        first.exchange(np.ones(5), np.zeros(5), 1, NONE)
        repeated = SharedMemoryParameterServer(segment, rule, 0, 2)
        repeated.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert repeated.contributions == [2, 0]
        with pytest.raises(InvalidInputError, match="another process exchanges under this rank"):
            first.exchange(np.ones(5), np.zeros(5), 1, NONE)
        assert repeated.contributions == [2, 0]


def test_what_does_not_fit_is_refused():
    rule = Rule()
    with a_center(others=2) as segment:
        client, fine = SharedMemoryParameterServer(segment, rule, 1, 2), np.zeros(2)
        for local, others in ((np.zeros(4), fine), (np.zeros(5, "float32"), fine), (np.zeros(5), np.zeros(3))):
            with pytest.raises(InvalidInputError, match=r"rank 1 gave (a vector|statistics) of shape"):
                client.exchange(local, np.zeros(5), 1, others)
            with pytest.raises(InvalidInputError, match="shape"):
                client.read(local, others)
        with pytest.raises(InvalidInputError, match="controller reads"):
            SharedMemoryParameterServer(segment).exchange(np.zeros(5), np.zeros(5), 1, fine)
        for arguments in ((rule, 2, 2), (rule, 0, 3), (None, 0, 2)):
            with pytest.raises(InvalidInputError):
                SharedMemoryParameterServer(segment, *arguments)
        assert client.clock == 0
    for center, others, memory, workers in (
        (np.zeros((2, 2)), NONE, (), 1),
        (np.zeros(2, int), NONE, (), 1),
        (np.zeros(2), NONE, (np.zeros(3),), 1),
        (np.zeros(2), NONE, (), 0),
    ):
        with pytest.raises(InvalidInputError):
            SharedMemoryParameterServer.create(center, others, memory, workers)
    with (
        Segment.create(4096) as plain,
        pytest.raises(InvalidInputError, match="a parameter server's was expected"),
    ):
        SharedMemoryParameterServer(plain)


def test_a_worker_closes_every_descriptor(ranks):
    script = (
        RULES
        + """
before = sorted(os.listdir("/proc/self/fd"))
with SharedMemoryParameterServer(fd, Rule(), rank, size) as center:
    center.exchange(np.ones(5), np.zeros(5), 1, np.zeros(0))
say(fewer=len(before) - len(os.listdir("/proc/self/fd")))
"""
    )
    with a_center() as segment:
        assert ranks.start(script, segment, 2).finish() == [[{"fewer": 1}]] * 2
