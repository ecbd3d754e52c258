"""A server of the center that ends before it has answered: what it was asked is asked again, and is done once."""

import math
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from choros import algorithms
from choros.comm.messages import Router, header_of
from choros.comm.shm.segment import Segment
from choros.comm.tcp import auth_socket
from choros.comm.tcp.reconnecting_client import ReconnectingClient
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError
from choros.param_server.center_state import export_state
from choros.param_server.messages import SHARD_REQUESTS, ReadCenter
from choros.param_server.shard_service import ParameterShard, reply_segment
from choros.param_server.sharded import ShardedParameterServer
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.param_server.transfer_client import TransferClient
from choros.param_server.transfer_slots import TransferSlots, VectorRelay, serve_transfers
from choros.training.async_control.control_block import ControlBlock
from choros.training.async_control.epoch_log import LINE, EpochLog
from choros.training.async_control.remote_control import (
    ReadHeader,
    ReadSums,
    RemoteControlBlock,
    RemoteEpochLog,
    protocols,
)
from choros.training.async_control.shard_server import ServerConfig, ShardServerProcess
from choros.training.spec import TrainerControl

SIZE, STATISTICS, WORKERS = 40_003, 5, 2
RULES = [kind for kind in algorithms.ALL if kind.level == "parameters" and kind.mode == "async"]
RULES += [lambda: algorithms.DOWNPOUR(adagrad=True), lambda: algorithms.ADAG(divide=True)]
NAMES = [*(kind.__name__ for kind in RULES[:-2]), "DOWNPOUR(adagrad)", "ADAG(divide)"]
NONE = np.zeros(0, "float32")


class Letter:
    """One end of a message between two ranks of this process."""

    def __init__(self, array):
        self.array, self.done = array, False


class Letters:
    """The messages of one rank; a message is done when both ends have started it, as a long one of MPI."""

    name, errors, concurrent = "letters", (OSError,), True
    sleep = staticmethod(time.sleep)

    def __init__(self, rank, post=None):
        self.rank, self.size = rank, WORKERS
        self.post, self.lock = ({}, threading.Lock()) if post is None else post

    def start(self, key, side, array):
        letter = Letter(array)
        with self.lock:
            actual, expected = (self.post.setdefault((*key, where), []) for where in (side, 1 - side))
            if expected:
                other = expected.pop(0)
                source, target = (letter, other) if side else (other, letter)
                target.array[:] = source.array
                letter.done = other.done = True
            else:
                actual.append(letter)
        return letter

    def send(self, array, rank, tag):
        return self.start((self.rank, rank, tag), 1, array)

    def receive(self, array, rank, tag):
        return self.start((rank, self.rank, tag), 0, array)

    def done(self, letters):
        return all(letter.done for letter in letters)


class Host:
    """A center in memory, its rank 0, and rank 1 elsewhere; ``harm`` breaks the connection at a question, once."""

    def __init__(self, rule, center, others, by_messages=False):
        self.rule, self.segment = (
            rule,
            SharedMemoryParameterServer.create(center, others, rule.start(center, WORKERS), WORKERS),
        )
        self.near = SharedMemoryParameterServer(self.segment, rule, 0, WORKERS)
        self.kept = reply_segment(self.near)
        self.control_block = ControlBlock.create(WORKERS, 2, 3)
        self.epoch_log = EpochLog(Segment.create(3 * LINE), self.control_block)
        self.listener = auth_socket.AuthListener("127.0.0.1", b"secret", auth_socket.RankGreeting)
        self.harm = {}  # at which question: before or after it is answered, or late, and what happens then
        self.came, self.served, self.centers, self.closed = 0, [], [], False
        self.transfers = self.relay = None
        if by_messages:
            post = {}, threading.Lock()
            self.transfers = TransferSlots.create(self.near)
            slots = TransferSlots(self.transfers, self.near)
            self.relay = VectorRelay(slots, Letters(0, post), self.kept, self.near, [1])
        self.porter = threading.Thread(target=self.welcome, daemon=True)
        self.porter.start()
        self.line = ReconnectingClient(
            self.listener.address, b"secret", auth_socket.RankGreeting(1), "The host", 20.0, 20.0
        )
        line = self.line
        if by_messages:
            line = TransferClient(self.line, Letters(1, post), 0, "here", len(center), center.dtype)
        self.far = ShardedParameterServer(rule, [(slice(0, len(center)), line)])

    def welcome(self):
        # One server all the time. Its slots are in shared memory, so another one would find the same in them.
        slots = TransferSlots(self.transfers, self.near) if self.transfers else None
        while not self.closed:
            try:
                greeting, end = self.listener.next_peer(0.1)
            except CommTimeoutError:
                continue
            self.came += 1
            center = ParameterShard(
                self.segment, self.rule, greeting.rank, WORKERS, self.kept
            )  # as a new process has it
            self.centers.append(center)
            channel = RpcConnection(end, "rank 1", 20.0)
            handle = Router((SHARD_REQUESTS, center.reply), *protocols(self.control_block, self.epoch_log)).handle
            serve = handle if slots is None else serve_transfers(slots, center, handle)

            def reply(head, arrays, serve=serve, channel=channel):
                kind = head.get("request", head)["op"]  # of the request in a ``Transfer``
                when, meanwhile = self.harm.pop(kind, (None, None))
                if when == "before":
                    channel.close()
                    return {}, []
                if when == "late":
                    meanwhile()
                header, vectors = serve(head, arrays)
                if when == "after":
                    meanwhile()
                    channel.close()
                return header, vectors

            self.served.append(threading.Thread(target=channel.serve, args=(reply,), daemon=True))
            self.served[-1].start()

    def close(self):
        self.line.close()
        self.closed = True
        for thread in (self.porter, *self.served):
            thread.join(20.0)
        rooms = self.kept, self.segment, self.epoch_log, self.control_block
        for result in (self.relay, self.listener, self.near, self.transfers, *rooms):
            if result is not None:
                result.close()


@pytest.fixture(params=["socket", "messages"])
def host(request):
    made = []

    def make(rule, center, others=NONE):
        made.append(Host(rule, center, others, request.param == "messages"))
        return made[-1]

    yield make
    for item in made:
        item.close()


def turns(first, when, steps):
    """Both ranks exchange in turn; rank 1's third one is cut, and rank 0's comes before it is asked for once more."""
    (begin, values), result = first.near.blank(), []
    first.far.read(begin, values)
    first.near.read(begin, values)
    actual = [(begin.copy(), begin.copy(), values.copy()) for _ in range(WORKERS)]

    def meet(rank, turn):
        for vector, step in zip(actual[rank][::2], steps[rank, turn], strict=True):
            vector += step
        local, seen, others = actual[rank]
        result.append([rank, [first.near, first.far][rank].exchange(local, seen, 4, others)])

    for turn in range(5):
        if turn == 2 and when:
            first.harm["Exchange"] = when, lambda: meet(0, 2)
        meet(1, turn)
        if turn != 2 or when != "after":
            meet(0, turn)
    return sorted(result), actual


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", RULES, ids=NAMES)
def test_an_exchange_that_was_cut_gives_the_bits_of_one_that_was_not(host, make, when):
    rule, rng = make().bound(WORKERS, 0.01, strict=False), np.random.default_rng(3)

    def draw():
        return rng.standard_normal(SIZE).astype("float32"), rng.standard_normal(STATISTICS).astype("float32")

    start, steps = draw(), {(rank, turn): draw() for rank in range(WORKERS) for turn in range(5)}
    server, cut = host(rule, *start), host(rule, *start)
    (stale, complete), (stale_too, result) = turns(server, "", steps), turns(cut, when, steps)
    assert (server.came, cut.came, cut.harm) == (1, 2, {})
    assert stale == stale_too
    for value, expected in zip(complete, result, strict=True):
        for vector, other in zip(value, expected, strict=True):
            np.testing.assert_array_equal(vector, other)
    (header, vectors), (header_too, vectors_too) = export_state(server.near), export_state(cut.near)
    np.testing.assert_array_equal(header, header_too)
    for vector, other in zip(vectors, vectors_too, strict=True):
        np.testing.assert_array_equal(vector, other)
    assert cut.near.contributions == [5, 5]


def test_a_center_that_was_set_is_taken_by_a_worker_whose_server_is_another_one(host):
    """Its earlier progress is dropped, also in the new server's first request; its next progress counts."""
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    local, seen = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")
    server.far.read(seen.copy(), NONE)
    server.near.replace(np.full(SIZE, 5, "float32"), NONE)
    server.harm["Exchange"] = "after", lambda: None
    assert server.far.exchange(local, seen, 1, NONE) == 0
    assert set(local) == set(seen) == {5.0}
    local += 1
    server.harm["Exchange"] = "after", lambda: server.near.replace(np.full(SIZE, 9, "float32"), NONE)
    server.far.exchange(local, seen, 1, NONE)  # it was merged, and then the center was set
    assert set(local) == {6.0}
    server.far.exchange(local, seen, 1, NONE)
    assert set(local) == {9.0}
    assert (server.came, server.near.contributions) == (3, [0, 1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_center_is_set_once_and_read_again(host, when):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    actual, seen, out = (np.zeros(SIZE, "float32") for _ in range(3))

    def bring():
        server.near.exchange(actual, seen, 1, NONE)
        actual.__iadd__(1)
        server.near.exchange(actual, seen, 1, NONE)

    server.harm["ReplaceCenter"] = when, bring
    server.far.replace(np.full(SIZE, 7, "float32"), NONE)
    if when == "before":
        bring()
    server.harm["ReadCenter"] = when, lambda: None
    server.far.read(out, NONE)
    assert set(out) == {8.0}  # what was brought after it was set is not lost by its being set again
    assert server.came == 3


def test_who_has_another_number_of_exchanges_is_not_served(host):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    local, seen = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")
    server.far.exchange(local, seen, 1, NONE)
    server.far._remote_shards[0][1].contributions = 5
    with pytest.raises(InvalidInputError, match="another process exchanges under this rank"):
        server.far.exchange(local, seen, 1, NONE)
    with pytest.raises(InvalidInputError, match="'explode'"):
        server.line.request({"op": "explode"})
    assert server.came == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_notes_of_another_host_are_left_once(host, when):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    control_block, epoch_log = RemoteControlBlock(server.line), RemoteEpochLog(server.line)
    ones = np.ones(3)
    server.harm["AddMetrics"] = when, lambda: server.control_block.add(0, 0, ones, ones)
    assert (
        control_block.add(0, 1, ones, ones) is False
    )  # rank 0 ends it last, also where rank 1 asks once more after that
    if when == "before":
        assert server.control_block.add(0, 0, ones, ones) is True
    assert server.control_block.add(0, 0, ones, ones) is True
    assert server.control_block.add(1, 0, ones, ones) is False
    server.harm["AddMetrics"] = when, lambda: None
    assert control_block.add(1, 1, ones, ones) is True
    server.harm |= {op: (when, lambda: None) for op in ("WriteLog", "ReadLog", "ReadSums", "ReadHeader")}
    epoch_log.write(1, {"loss": 0.5}, 2.0, [1.5])
    assert epoch_log.read_new() == [(1, {"loss": 0.5}, 2.0, [1.5])]
    epoch_log.write(0, {"loss": 0.25}, 3.0, [])
    assert epoch_log.read_new() == [(0, {"loss": 0.25}, 3.0, [])]
    assert [part.tolist() for part in control_block.sums(1)] == [[2.0] * 3] * 2
    assert not control_block.stopped
    server.control_block.publish(TrainerControl(learning_rate=0.0))
    time.sleep(0.06)  # orders that were read hold so long
    assert control_block.rate() == 0.0
    assert server.epoch_log.read_new() == [(1, {"loss": 0.5}, 2.0, [1.5]), (0, {"loss": 0.25}, 3.0, [])]
    assert (server.harm, server.came) == ({}, 7)


@pytest.mark.parametrize(("ordered", "taken"), [(0.0, 0.0), (math.nan, None), (math.inf, None)])
def test_a_learning_rate_is_taken_on_another_host_as_on_the_same_one(host, ordered, taken):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    server.control_block.publish(TrainerControl(learning_rate=ordered))
    assert server.control_block.rate() == taken
    assert RemoteControlBlock(server.line).rate() == taken


def test_a_reply_that_comes_too_late_is_no_reply_to_the_next_request(host):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    server.line.timeout = 0.2
    server.harm["ReadHeader"] = "late", lambda: time.sleep(0.5)
    with pytest.raises(CommTimeoutError, match="did not answer for 0.2 s"):
        server.line.request(header_of(ReadHeader(rank=1, steps=0, end_requested=False)))
    server.line.timeout = 20.0
    time.sleep(0.6)
    header, arrays = server.line.request(header_of(ReadSums(epoch=0)))
    assert (header, len(arrays)) == ({"op": "SumsReply"}, 2)
    assert server.came == 2


def test_a_server_whose_rank_has_gone_too_is_an_error(host):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    server.listener.close()
    server.harm["ReadCenter"] = "before", None
    for _ in range(2):
        with pytest.raises(PeerLostError, match="The host has gone, and so has the rank that would start another one"):
            server.far.read(np.zeros(SIZE, "float32"), NONE)


def test_a_server_that_is_not_back_in_time_is_an_error(host, monkeypatch):
    monkeypatch.setattr(auth_socket, "_HANDSHAKE_SECONDS", 0.2)
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    port, heard = auth_socket.listening_socket("127.0.0.1")  # as of a rank that lives, and starts no server
    try:
        server.line._place, server.line.timeout = f"127.0.0.1:{port}", 1.0
        server.harm["ReadCenter"] = "before", None
        with pytest.raises(PeerLostError, match=r"The host has gone, and no other one answered for 1 s \("):
            server.far.read(np.zeros(SIZE, "float32"), NONE)
    finally:
        os.close(heard)


@pytest.mark.parametrize("members", ["near", "far"])
def test_memory_goes_with_a_center_that_was_set(host, members):
    """ADAG measures how far the center moved since a worker saw it: what was set is what all see next."""
    server = host(algorithms.ADAG(), np.zeros(SIZE, "float32"))
    start = np.zeros(SIZE, "float32")
    server.near.exchange(start.copy(), start.copy(), 1, NONE)
    server.far.exchange(start.copy(), start.copy(), 1, NONE)
    getattr(server, members).replace(np.full(SIZE, 5, "float32"), NONE)
    for seat in (server.near, server.far):
        local, seen = start.copy(), start.copy()
        seat.exchange(local, seen, 1, NONE)
        np.testing.assert_array_equal(local, 5)
    for seat in (server.near, server.far)[:1]:
        local, seen = np.full(SIZE, 5.1, "float32"), np.full(SIZE, 5, "float32")
        seat.exchange(local, seen, 1, NONE)
        np.testing.assert_allclose(local, 5.1, rtol=1e-6)


def test_a_worker_that_reads_nothing_keeps_no_other_from_the_server():
    rule, vector = algorithms.AEASGD(alpha=0.5), np.ones(1 << 20, "float32")
    with (
        SharedMemoryParameterServer.create(vector, NONE, rule.start(vector, WORKERS), WORKERS) as segment,
        SharedMemoryParameterServer(segment, rule, 0, WORKERS) as center,
        reply_segment(center) as saved,
    ):
        config = ServerConfig(
            algorithm=algorithms.to_config(rule),
            algorithm_code="",
            workers=WORKERS,
            timeout=20.0,
            secret=b"secret".hex(),
            address="127.0.0.1",
            center=segment.fd,
            replies=saved.fd,
        )
        server = ShardServerProcess(config)
        try:
            stuck, other = (
                RpcConnection(
                    auth_socket.dial(server.address, b"secret", auth_socket.RankGreeting(rank), 20.0), "it", 20.0
                )
                for rank in range(WORKERS)
            )
            for _ in range(8):  # answers of 4 MB each, which fill what the system keeps for a socket
                stuck.send(header_of(ReadCenter()))
            assert other.request(header_of(ReadCenter()))[1][0].sum() == vector.size
            stuck.close()
            other.close()
        finally:
            server.close()


FORKS = """
    import os, time
    import numpy as np
    from choros import algorithms
    from choros.param_server.shard_service import reply_segment
    from choros.param_server.shared_memory import SharedMemoryParameterServer
    from choros.training.async_control.shard_server import ServerConfig, ShardServerProcess

    rule, vector, none = algorithms.AEASGD(alpha=0.5), np.ones(64, "float32"), np.zeros(0, "float32")
    segment = SharedMemoryParameterServer.create(vector, none, rule.start(vector, 2), 2)
    kept = reply_segment(SharedMemoryParameterServer(segment, rule, 0, 2))
    settings = dict(algorithm_code="", workers=2, timeout=20.0, secret="00", address="127.0.0.1")
    server = ShardServerProcess(
        ServerConfig(algorithm=algorithms.to_config(rule), center=segment.fd, replies=kept.fd, **settings)
    )
    forked = os.fork()
    if forked:
        print(server._process.pid, server.address.rpartition(":")[2], forked, flush=True)
    time.sleep(100)
"""


def test_a_forked_child_keeps_neither_the_server_of_a_dead_rank_nor_its_port():
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(FORKS)], stdout=subprocess.PIPE) as rank:
        served, port, forked = map(int, rank.stdout.readline().split())
        ended = os.pidfd_open(served)
        try:
            rank.kill()
            assert select.select([ended], [], [], 10.0)[0]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10.0)
        finally:
            os.close(ended)
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("op", ["Exchange", "ReadCenter"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("host", ["messages"], indirect=True)
def test_a_vector_that_was_fetched_twice_is_sent_once(host, op, when):
    """The server dies before or after it has sent the vector; the next one is asked for the same."""
    server = host(algorithms.AEASGD(alpha=0.5), np.zeros(SIZE, "float32"))
    local, seen, out = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32"), np.full(SIZE, 7, "float32")
    server.far.read(seen.copy(), NONE)
    server.harm["Fetch"] = when, lambda: None
    if op == "Exchange":
        server.far.exchange(local, seen, 4, NONE)
        assert set(local) == {0.5}
    else:
        server.far.read(out, NONE)
        assert set(out) == {0.0}
        server.far.exchange(local, seen, 4, NONE)
    for _ in range(2):
        assert server.far.read(out, NONE) == 1
        assert set(out) == {0.5}
    assert (server.harm, server.came, server.near.contributions) == ({}, 2, [0, 1])


@pytest.mark.parametrize("host", ["messages"], indirect=True)
def test_a_message_that_never_ends_is_an_error_in_time_and_vectors_go_by_tcp_then(host, caplog):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    local, seen, out = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32"), np.zeros(SIZE, "float32")
    server.far.read(out, NONE)
    server.relay.close()  # as in a rank that is stopped
    server.line.timeout, server.centers[0].timeout = 0.3, 3.0
    with pytest.raises(CommTimeoutError, match="The host did not answer for 0.3 s"):
        server.far.exchange(local, seen, 4, NONE)
    assert "rank 0 on here: a message did not end. This rank sends its vectors by TCP from now on." in caplog.text
    server.line.timeout = 20.0
    server.far.exchange(local, seen, 4, NONE)
    server.far.read(out, NONE)
    assert set(out) == {1.0}
    assert server.near.contributions == [0, 1]


@pytest.mark.parametrize("host", ["messages"], indirect=True)
def test_messages_that_fail_in_the_host_s_first_rank_are_an_error_at_once(host, caplog):
    server = host(algorithms.DOWNPOUR(), np.zeros(SIZE, "float32"))
    local, seen = np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")
    server.far.read(seen.copy(), NONE)

    def fail(*_):
        raise OSError("the fabric is down")

    server.relay._messages.receive = fail
    with pytest.raises(PeerLostError, match="The messages of .*'s first rank failed: see its output"):
        server.far.exchange(local, seen, 4, NONE)
    assert "letters failed at a vector of the center: OSError: the fabric is down" in caplog.text
    server.far.exchange(local, seen, 4, NONE)  # by TCP
    assert server.near.contributions == [0, 1]
