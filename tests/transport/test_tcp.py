"""Sockets of our own: who is let in, who is told of what, and what a death or a silence looks like."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from choros.cluster.hardware.network_address import addresses, own_address, pass_on
from choros.comm.bootstrap import rendezvous
from choros.comm.bootstrap.rendezvous import (
    Rendezvous,
    RendezvousGreeting,
    join_rendezvous,
    ports,
    refuse_second_rank_zero,
)
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, dial
from choros.comm.tcp.connections import ConnectionMesh, TcpMessages
from choros.comm.tcp.group import TcpGroup
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError

SECRET = secrets.token_bytes(32)


@pytest.fixture
def listener():
    with AuthListener("127.0.0.1", SECRET, RendezvousGreeting) as listener:
        yield listener


def test_a_door_that_does_not_know_the_secret_is_left():
    with (
        AuthListener("127.0.0.1", b"somebody else's", RankGreeting) as other,
        pytest.raises(PeerLostError, match="does not belong to this job"),
    ):
        dial(other.address, SECRET, RankGreeting(0), 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        threading.Thread(target=lambda: deaf.accept()[0].close(), daemon=True).start()
        with pytest.raises(PeerLostError, match="No listener answers|ended"):
            dial(f"127.0.0.1:{deaf.getsockname()[1]}", SECRET, RankGreeting(0), 1)
    with pytest.raises(PeerLostError, match=r"No listener answers at 127.0.0.1:1 .*CHOROS_NETWORK"):
        dial("127.0.0.1:1", SECRET, RankGreeting(0), 0.2)
    with pytest.raises(InvalidInputError, match="must be this host's"):
        AuthListener("192.0.2.1", SECRET, RankGreeting)
    with pytest.raises(InvalidInputError, match="no port is given"):
        AuthListener("127.0.0.1", SECRET, RankGreeting, [])


def test_the_first_of_several_ports_that_has_this_job():
    """Another job sits on the first port: both jobs have places of their own."""
    first, second, *_ = ports(SECRET)
    with (
        AuthListener("127.0.0.1", b"another job's", RankGreeting, [first]),
        AuthListener("127.0.0.1", SECRET, RankGreeting, [first, second]) as actual,
    ):
        assert actual.address.endswith(f":{second}")
        end = dial(f"127.0.0.1:{first},{second}", SECRET, RankGreeting(1, "n1"), 5)
        greeting, near = actual.next_peer(5)
        assert greeting == RankGreeting(1, "n1")
        end.close()
        near.close()


def test_the_address_by_which_others_reach_this_host():
    here = addresses()
    assert here["lo"] == "127.0.0.1"
    assert own_address("lo") == own_address("127.0.0.1") == "127.0.0.1"
    assert own_address() in here.values()
    assert own_address("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(InvalidInputError, match="no such interface"):
        own_address("192.0.2.0/33")
    with pytest.raises(InvalidInputError, match=r"no such interface .*lo \(127.0.0.1\)"):
        own_address("nosuch0")
    with pytest.raises(InvalidInputError, match=r"no.such.domain.invalid cannot be looked up"):
        own_address(".no.such.domain.invalid")


def test_other_libraries_are_told_the_same_network(monkeypatch):
    there = [("lo", "127.0.0.1"), ("hsn0", "10.1.2.3")]
    listed = [{"name": name, "up": True, "addresses": [address]} for name, address in there]
    monkeypatch.setattr("choros.cluster.hardware.network_address.interfaces", lambda: listed)
    for network in ("hsn0", "hsn", "10.1.0.0/16", "10.1.2.3"):
        message = pass_on(network)
        assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_TCP_IFACE"} <= message.keys()
        assert {name for name, value in message.items() if value != "hsn0"} == {
            "NCCL_SOCKET_IFNAME",
            "RCCL_SOCKET_IFNAME",
        }
        assert message["NCCL_SOCKET_IFNAME"] == "=hsn0"  # hsn0 alone would mean hsn01 too


def test_a_meeting_tells_all_who_did_not_come(listener):
    Rendezvous(listener, 3)
    with pytest.raises(CommTimeoutError, match=r"ranks 1, 2 of 3 did not connect to 127.0.0.1"):
        join_rendezvous(listener.address, SECRET, 0, 0.5)(b"x")


def pair():
    near, two = socket.socketpair()
    links = ConnectionMesh({1: (near, "rank 1 on here")}), ConnectionMesh({0: (two, "rank 0 on here")})
    return [TcpMessages(link, rank, range(2)) for rank, link in enumerate(links)]


def finish(requests, *sides):
    for _ in range(1000):
        for side in sides:
            side.done([])
        if all(request.done for request in requests):
            return
    raise AssertionError("not done")


def test_a_rank_that_waits_for_others_says_so_and_for_whom(listener, monkeypatch, capfd):
    """Two processes with other secrets each wait for the other one, so each tells the mark of its own."""
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.3)
    Rendezvous(listener, 2)
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 did not connect"):
        join_rendezvous(listener.address, SECRET, 0, 1.0)(b"")
    with pytest.raises(PeerLostError, match="No listener answers at 127.0.0.1:1 "):
        join_rendezvous("127.0.0.1:1", b"another", 1, 1.0)(b"")
    stderr = capfd.readouterr().err
    marks = re.findall(r"CHOROS_SECRET has the fingerprint (\w{6})", stderr)
    assert len(set(marks)) == len(marks) == 2, stderr


def test_a_secret_that_nobody_was_told_is_not_spoken_of(listener, monkeypatch, capfd):
    """That of tasks of Spark, which the driver draws."""
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.3)
    Rendezvous(listener, 2, from_variable=False)
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 did not connect"):
        join_rendezvous(listener.address, SECRET, 0, 1.0, from_variable=False)(b"")
    with pytest.raises(PeerLostError, match="No listener answers at 127.0.0.1:1 "):
        join_rendezvous("127.0.0.1:1", b"another", 1, 1.0, from_variable=False)(b"")
    stderr = capfd.readouterr().err
    assert "rank 1 of 2 did not connect within" in stderr
    assert "CHOROS_SECRET" not in stderr
    assert "choros: rank 1 of 2 did not connect within 0.3 s" in stderr
    assert "choros: rank 1: No listener answers at 127.0.0.1:1 " in stderr
    assert "It tries for 0.7 s more" in stderr


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_is_there_twice_or_is_none_is_refused(rank, listener):
    Rendezvous(listener, 3)
    first = threading.Thread(target=lambda: errors.append(_error(join_rendezvous(listener.address, SECRET, 1, 20.0))))
    errors = []
    first.start()
    time.sleep(0.2)
    members = {1: "Two processes connected as rank 1", 3: "A process connected as rank 3"}[rank]
    errors.append(_error(join_rendezvous(listener.address, SECRET, rank, 20.0)))
    first.join(10)
    assert len(errors) == 2
    for error in errors:
        assert f"{members} of 3: give each process of the job a rank of its own" in error


def test_two_first_ranks_on_a_host_are_told_so():
    among = ports(SECRET)
    with (
        AuthListener("127.0.0.1", b"another job's", RankGreeting, among[:1]),
        AuthListener("127.0.0.1", SECRET, RendezvousGreeting, among) as first,
    ):
        Rendezvous(first, 2)
        refuse_second_rank_zero(first, among)
        with (
            AuthListener("127.0.0.1", SECRET, RendezvousGreeting, among) as second,
            pytest.raises(InvalidInputError, match="is rank 0 of this job"),
        ):
            refuse_second_rank_zero(second, among)
        assert "Two processes connected as rank 0 of 2" in _error(join_rendezvous(first.address, SECRET, 0, 20.0))


def _error(swap):
    with pytest.raises((InvalidInputError, PeerLostError)) as raised:
        swap(b"")
    return str(raised.value)


def test_messages_that_come_before_they_are_asked_for_are_kept():
    """Of several groups and tags, in the order of each; also one that is asked for while it comes."""
    near, two = pair()
    a, b = near.part([0, 1]), two.part([0, 1])
    big = np.arange(4_000_000 % 251 * 4000, dtype=np.uint8)
    sent = [near.send(big, 1, 7), a.send(np.full(3, 1, np.uint8), 1, 7), near.send(np.full(2, 2, np.uint8), 1, 8)]
    sent += [near.send(np.empty(0, np.uint8), 1, 9), near.send(np.full(2, 3, np.uint8), 1, 8)]
    late = np.zeros(2, np.uint8)
    first = two.receive(late, 0, 8)
    for _ in range(5):  # some of the first message is here now
        near.done([])
        two.done([])
    complete, early, repeated = np.zeros_like(big), np.zeros(3, np.uint8), np.zeros(2, np.uint8)
    wanted = [first, two.receive(complete, 0, 7), b.receive(early, 0, 7), two.receive(repeated, 0, 8)]
    wanted.append(two.receive(np.empty(0, np.uint8), 0, 9))
    finish([*sent, *wanted], near, two)
    assert np.array_equal(complete, big)
    assert (late.tolist(), early.tolist(), repeated.tolist()) == ([2, 2], [1, 1, 1], [3, 3])
    near.free(False)
    with pytest.raises(ConnectionError, match="rank 0 on here has gone .it closed the connection"):
        finish([two.receive(late, 0, 8)], two)
    two.free(True)
    assert near.is_closed()
    assert two.is_closed()


def test_a_message_that_is_too_long_is_an_error():
    near, two = pair()
    sent = near.send(np.zeros(5, np.uint8), 1, 7)
    two.receive(np.zeros(4, np.uint8), 0, 7)
    with pytest.raises(ConnectionError, match="sent 5 bytes where 4 were expected"):
        finish([sent], near, two)
    for side in (near, two):
        side.free(True)


def test_a_channel_refuses_what_is_no_number():
    near, two = (RpcConnection(end, "the other", 5) for end in socket.socketpair())
    near._sock.sendall((30).to_bytes(4, "little") + b'[{"op": 1}, [["object", 100]]]')
    with pytest.raises(PeerLostError, match="not a message .*object cannot be summed"):
        two.receive()
    near.timeout = two.timeout = 0.2
    with pytest.raises(CommTimeoutError, match=r"the other did not answer for 0.2 s"):
        near.request({"op": "read"})
    with pytest.raises(PeerLostError, match="The connection with the other has failed before"):
        near.request({"op": "read"})
    near.close()
    two.close()


def test_a_channel_whose_other_end_has_gone_says_so():
    near, two = (RpcConnection(end, "the other", 5) for end in socket.socketpair())
    two.close()
    with pytest.raises(PeerLostError, match="the other has gone"):
        near.request({"op": "read"})
    near.close()


RANKS = """
import os, signal, sys, time
import numpy as np
from choros.errors import ChorosError
from choros.comm.shm.group import SharedGroup
from choros.comm.tcp.group import TcpGroup

rank, size = int(os.environ["CHOROS_RANK"]), int(os.environ["CHOROS_SIZE"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the launcher ends those that are left
near = SharedGroup(int(os.environ["CHOROS_COMM_FD"]), rank, timeout=60)
group = TcpGroup(rank, size, near.gather, b"of this test", timeout=60)
group.barrier()
begun = time.perf_counter()
if rank == 1:
    HOW
try:
    for _ in range(3):
        group.timeout = 1.0
        group.sum(np.ones(1_000_000))
except ChorosError as error:
    print(f"<{rank} {type(error).__name__} {time.perf_counter() - begun:.2f} s: {error}>", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "PeerLostError", "rank 1 .process|rank 1 on"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "CommTimeoutError", "for rank 1 of 3"),
        ("group.close(); time.sleep(3); os._exit(0)", "PeerLostError", "rank 1 left"),
    ],
)
def test_a_rank_that_dies_hangs_or_leaves_is_named_by_all(how, kind, message, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS.replace("HOW", how))
    ended = (
        subprocess.run(
            [sys.executable, "-m", "choros", "run", "-n", "3", "--grace", "8", sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        if "SIGSTOP" not in how
        else _stopped(script)
    )
    matches = re.findall(r"<(\d) (\w+) ([\d.]+) s: (.*)>", ended.stdout)
    matches = [result for result in matches if result[0] != "1"]  # which was stopped and wakes up at the end
    assert sorted(rank for rank, *_ in matches) == ["0", "2"], ended.stdout + ended.stderr
    for _, item, seconds, text in matches:
        assert item == kind, text
        assert re.search(message, text), text
        assert float(seconds) < 5


def _stopped(script):
    """A rank that stops for good: the job is ended by hand once the two others have."""
    job = subprocess.Popen(
        [sys.executable, "-m", "choros", "run", "-n", "3", "--grace", "1", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    for line in job.stdout:
        lines.append(line)
        if len([result for result in lines if "<" in result]) == 2:
            break
    job.send_signal(signal.SIGTERM)
    rest, err = job.communicate(timeout=30)
    return subprocess.CompletedProcess([], job.returncode, "".join(lines) + rest, err)


def test_ranks_that_cannot_be_reached_are_named():
    with pytest.raises(CommTimeoutError, match=r"rank 0 on .* for ranks 1, 2 of 3.*CHOROS_NETWORK"):
        TcpGroup(0, 3, lambda vector: [vector] * 3, SECRET, timeout=0.3)
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match=r"rank 1 on .* cannot reach rank 0 on there"):
        TcpGroup(1, 2, lambda vector: [b'["127.0.0.1:1", "there"]', vector], SECRET, timeout=0.3)
    assert time.monotonic() - begun < 5
