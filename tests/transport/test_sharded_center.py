"""A center between hosts: what any algorithm gives there is what it gives in one process, part for part."""

import threading
from functools import partial

import numpy as np
import pytest

from choros import algorithms
from choros.comm.messages import Router
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError
from choros.param_server import sharded_center_state
from choros.param_server.center_state import encode_position
from choros.param_server.in_memory import InMemoryParameterServer
from choros.param_server.messages import SHARD_REQUESTS, STATE_REQUESTS
from choros.param_server.shard_service import ParameterShard, reply_segment
from choros.param_server.sharded import ShardedParameterServer
from choros.param_server.shared_memory import SharedMemoryParameterServer

SIZE, STATISTICS, WORKERS = 70_003, 7, 3
CUTS = {"one": [slice(0, SIZE)], "two": [slice(0, 30_000), slice(30_000, SIZE)]}
RULES = [kind for kind in algorithms.ALL if kind.level == "parameters" and kind.mode is not None]


@pytest.fixture
def hosts():
    """Two hosts that serve a part each; what makes a worker's hold on the center, at one of the hosts or at none."""
    held, rooms, guests = [], [], []

    def start(rule, center, others, cuts):
        doors = []
        for i, cut in enumerate(cuts):
            vector, values = center[cut].copy(), others if i == 0 else others[:0]
            segment = SharedMemoryParameterServer.create(vector, values, rule.start(vector, WORKERS), WORKERS)
            listener = AuthListener("127.0.0.1", b"secret", RankGreeting)
            saved = reply_segment(SharedMemoryParameterServer(segment))
            rooms.extend([listener, segment, saved])
            doors.append((listener, segment, saved))

        def at(rank, host):
            parts = []
            for i, cut in enumerate(cuts):
                listener, segment, saved = doors[i]
                if i == host:
                    parts.append((cut, SharedMemoryParameterServer(segment, rule, rank, WORKERS)))
                else:
                    line = RpcConnection(dial(listener.address, b"secret", RankGreeting(rank), 5.0), f"host {i}", 5.0)
                    guests.append(guest(listener, segment, saved, rule))
                    parts.append((cut, line))
                    held.insert(0, line)
            result = ShardedParameterServer(rule, parts)
            held.insert(0, result)
            return result

        return at

    def guest(listener, segment, saved, rule):
        greeting, end = listener.next_peer(5.0)
        center = ParameterShard(segment, rule, greeting.rank, WORKERS, saved)
        answer = RpcConnection(end, "a worker", 5.0).serve
        state = STATE_REQUESTS, partial(sharded_center_state.reply, center)
        handler = Router((SHARD_REQUESTS, center.reply), state).handle
        thread = threading.Thread(target=answer, args=(handler,), daemon=True)
        thread.start()
        return thread

    yield start
    for item in held:
        item.close()
    for thread in guests:  # which close their sockets when nobody asks any more
        thread.join(5.0)
    for item in rooms:
        item.close()


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_algorithm_gives_what_it_gives_in_one_process(hosts, kind, cuts):
    rule = kind().bound(WORKERS, 0.01, strict=False)
    rng = np.random.default_rng(3)
    begin, values = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")
    if not rule.elementwise and cuts == "two":
        with pytest.raises(InvalidInputError, match="cannot be divided"):
            hosts(rule, begin, values, CUTS[cuts])(0, 0)
        return
    first = InMemoryParameterServer(rule, begin, WORKERS, values)
    at = hosts(rule, begin, values, CUTS[cuts])
    centers = [at(0, 0), at(1, 1), at(2, 1)]  # at home with the first part, with the second, and again
    actual = [(begin.copy(), begin.copy(), values.copy()) for _ in range(WORKERS)]
    expected = [(begin.copy(), begin.copy(), values.copy()) for _ in range(WORKERS)]
    for center, (local, seen, others) in zip(centers, actual, strict=True):
        assert center.read(local, others) == 0
        seen[:] = local
    for rank in (0, 1, 1, 2, 0, 2, 1):
        step, more = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")
        for vectors in (actual[rank], expected[rank]):
            vectors[0][:] += step
            vectors[2][:] += more
        stale = centers[rank].exchange(*actual[rank][:2], 4, actual[rank][2])
        assert stale == first.exchange(rank, *expected[rank][:2], 4, expected[rank][2])
        np.testing.assert_allclose(actual[rank][0], expected[rank][0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(actual[rank][2], expected[rank][2], rtol=0, atol=2e-6)
    for center in centers:
        out, others = np.empty_like(begin), np.empty_like(values)
        assert center.read(out, others) == 7
        np.testing.assert_allclose(out, first.center, rtol=0, atol=2e-6)
        np.testing.assert_allclose(others, first.statistics, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_trial_is_the_center_with_what_all_have_left(hosts, kind, cuts):
    """Rank 2 has exchanged since, and counts no more; nothing is kept, and the exchanges that come are the same."""
    rule = kind().bound(WORKERS, 0.01, strict=False)
    if not rule.elementwise and cuts == "two":
        return
    rng = np.random.default_rng(4)
    begin, values = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")
    first = InMemoryParameterServer(rule, begin, WORKERS, values)
    at = hosts(rule, begin, values, CUTS[cuts])
    centers = [at(0, 0), at(1, 1), at(2, 1)]
    out, mean = np.empty_like(begin), np.empty_like(values)
    actual, expected = ([(begin.copy(), begin.copy(), values.copy()) for _ in range(WORKERS)] for _ in range(2))
    for rank in (1, 2, 0, 2, 1):
        step = rng.standard_normal(SIZE).astype("float32")
        for vectors in (actual[rank], expected[rank]):
            vectors[0][:] += step
        centers[rank].exchange(*actual[rank][:2], 4, actual[rank][2])
        first.exchange(rank, *expected[rank][:2], 4, expected[rank][2])
    for rank in range(WORKERS):
        step, more = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")
        for vectors in (actual[rank], expected[rank]):
            vectors[0][:] += step
            vectors[2][:] += more
        centers[rank].publish_pending(*actual[rank][:2], 4, actual[rank][2])
        np.testing.assert_array_equal(actual[rank][0], expected[rank][0])
    centers[2].exchange(*actual[2][:2], 4, actual[2][2])
    first.exchange(2, *expected[2][:2], 4, expected[2][2])
    centers[1].trial(out, mean)
    repeated = out.copy(), mean.copy()
    centers[0].trial(out, mean)
    np.testing.assert_array_equal(out, repeated[0])
    assert centers[0].read(out, mean) == 6
    np.testing.assert_allclose(out, first.center, rtol=0, atol=2e-6)
    for rank in (0, 1):
        centers[rank].exchange(*actual[rank][:2], 4, actual[rank][2])
        first.exchange(rank, *expected[rank][:2], 4, expected[rank][2])
    np.testing.assert_allclose(repeated[0], first.center, rtol=0, atol=4e-6)
    np.testing.assert_allclose(repeated[1], first.statistics, rtol=0, atol=4e-6)
    centers[2].trial(out, mean)  # nobody has left anything since
    centers[0].read(*repeated)
    np.testing.assert_array_equal(out, repeated[0])
    np.testing.assert_array_equal(mean, repeated[1])


def test_what_was_left_is_void_where_the_center_was_set(hosts):
    rule = algorithms.DOWNPOUR()
    zero, none = np.zeros(SIZE, "float32"), np.zeros(0, "float32")
    at = hosts(rule, zero, none, CUTS["two"])
    lead, far = at(0, 0), at(1, 1)
    for center in (lead, far):
        center.publish_pending(np.ones(SIZE, "float32"), zero, 4, none)
    out = zero.copy()
    lead.trial(out, none)
    assert set(out) == {2.0}
    lead.replace(np.full(SIZE, 5, "float32"), none)
    far.trial(out, none)
    assert set(out) == {5.0}


def test_a_center_that_was_set_is_taken_as_it_is(hosts):
    rule = algorithms.DOWNPOUR()
    zero, none = np.zeros(SIZE, "float32"), np.zeros(0, "float32")
    at = hosts(rule, zero, none, CUTS["two"])
    lead, far = at(0, 0), at(1, 1)
    far.read(zero.copy(), none, adopt=True)
    lead.replace(np.full(SIZE, 5, "float32"), none)
    far.read(zero.copy(), none)  # for a callback, before the first exchange
    local, seen = np.ones(SIZE, "float32"), zero.copy()
    assert far.exchange(local, seen, 4, none) == 0
    assert set(local) == set(seen) == {5.0}
    far.replace(np.full(SIZE, 7, "float32"), none)
    local = np.ones(SIZE, "float32")
    lead.exchange(local, seen, 4, none)
    assert set(local) == {7.0}
    local += 1
    lead.exchange(local, seen, 4, none)
    assert set(local) == {8.0}


def test_a_center_that_is_set_while_a_worker_exchanges_can_be_saved(hosts):
    zero, none = np.zeros(SIZE, "float32"), np.zeros(0, "float32")
    at = hosts(algorithms.DOWNPOUR(), zero, none, CUTS["two"])
    lead, far = at(0, 0), at(1, 1)
    ((_, _, near),), ((_, remote),) = far._local_shards, far._remote_shards
    exchange, send, delayed = near.exchange, remote.send, []

    def exchange_here_first(*arguments):
        result = exchange(*arguments)
        lead.replace(np.full(SIZE, 5, "float32"), none)
        send(*delayed)
        return result

    near.exchange, remote.send = exchange_here_first, delayed.append
    far.exchange(np.ones(SIZE, "float32"), zero.copy(), 4, none)
    _, (center, *_) = sharded_center_state.export_state(lead)
    assert set(center) == {5.0}


def test_what_a_host_complains_of_reaches_the_worker_and_the_next_question_is_answered(hosts):
    rule = algorithms.AEASGD(alpha=0.3)
    zero, none = np.zeros(SIZE, "float32"), np.zeros(0, "float32")
    at = hosts(rule, zero, none, CUTS["two"])
    center = at(0, 2)
    assert center.timeout == 5.0
    with pytest.raises(InvalidInputError, match="host 0: InvalidInputError: rank 0 gave statistics of shape"):
        center.exchange(zero.copy(), zero.copy(), 1, np.zeros(3, "float32"))
    assert center.read(np.empty_like(zero), none) == 0
    line = center._remote_shards[0][1].connection
    with pytest.raises(InvalidInputError, match="'explode'"):
        line.request({"op": "explode"})
    with pytest.raises(InvalidInputError, match="Message ReplaceCenter: field times_set must be int, and is '0'"):
        line.request({"op": "ReplaceCenter", "times_set": "0", "clock": 0}, [zero, none])
    line.close()
    with pytest.raises(PeerLostError, match="host 0 has gone"):
        center.read(np.empty_like(zero), none)


def test_after_an_error_at_one_host_no_reply_of_another_is_left_unread(hosts):
    """A worker reads the center after an error; it must not take the reply to its exchange for that."""
    rule = algorithms.AEASGD(alpha=0.25)  # its reply is the center before the merge
    zero, none = np.zeros(SIZE, "float32"), np.zeros(0, "float32")
    center = hosts(rule, zero, none, CUTS["two"])(0, 0)
    (_, near, server), ready, done = center._local_shards[0], threading.Event(), threading.Event()

    def hold():
        with server._lock.hold(5.0, "a test"):
            ready.set()
            done.wait(20.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert ready.wait(5.0)
    server.timeout = 0.1
    local = np.ones(SIZE, "float32")
    with pytest.raises(CommTimeoutError, match="another thread of this process has held the center"):
        center.exchange(local, zero.copy(), 1, none)
    done.set()
    holder.join()
    center.read(local, none)
    assert set(local[near]) == {0.0}
    assert set(local[near.stop :]) == {0.25}  # of the far host, which has merged
    center.exchange(np.ones(SIZE, "float32"), zero.copy(), 1, none)
    center.read(local, none)
    assert set(local[near.stop :]) == {0.4375}


@pytest.mark.parametrize("cuts", CUTS)
def test_an_exported_state_continues_on_other_hosts(hosts, cuts):
    rule = algorithms.DOWNPOUR(adagrad=True).bound(WORKERS, 0.01, strict=False)  # has a memory
    rng = np.random.default_rng(5)
    begin, values = rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")
    steps = [rng.standard_normal(SIZE).astype("float32") for _ in range(2)]
    at = hosts(rule, begin, values, CUTS[cuts])
    center, local, seen = at(1, 1), begin.copy(), begin.copy()
    center.position_word = encode_position(2, 5)
    local += steps[0]
    center.exchange(local, seen, 4, values.copy())
    lead = at(0, 1)  # with "two", a shard of each kind
    assert (sharded_center_state.position_of(lead, 1), sharded_center_state.position_of(lead, 2)) == ((2, 5), None)
    header, vectors = sharded_center_state.export_state(lead)
    other = hosts(rule, np.zeros_like(begin), np.zeros_like(values), CUTS["two" if cuts == "one" else "one"])
    sharded_center_state.import_state(other(0, 0), header, vectors)
    resumed, exported = other(1, 1), (local.copy(), seen.copy())
    sharded_center_state.refresh(resumed)
    results = []
    for server, (value, shown) in ((center, (local, seen)), (resumed, exported)):
        value += steps[1]
        stale = server.exchange(value, shown, 4, values.copy())
        repeated, others = np.empty_like(begin), np.empty_like(values)
        results.append((stale, server.read(repeated, others), value, repeated, others))
    assert results[0][1] == results[1][1] == 2
    for actual, two in zip(results[0][2:], results[1][2:], strict=True):
        np.testing.assert_array_equal(actual, two)
