"""Connections from outside the job: many at once, slow ones, partial and oversized messages. Ranks connect too."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from choros.comm.tcp import auth_socket
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import CommTimeoutError, PeerLostError

SECRET = secrets.token_bytes(32)


@pytest.fixture
def listener():
    with AuthListener("127.0.0.1", SECRET, RankGreeting) as listener:
        yield listener


def stranger(listener):
    host, port = listener.address.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def came(listener):
    with pytest.raises(CommTimeoutError, match="No peer connected"):
        listener.next_peer(0.3)


def shut(end):
    """Return whether the other end has closed the connection."""
    try:
        return end.recv(1) == b""
    except ConnectionResetError:  # it had not read all
        return True


def guests():
    return [thread for thread in threading.enumerate() if thread.name == "choros-handshake"]


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_strangers_are_not_let_in(listener):
    """A peer without the secret, with another protocol or no message is dropped, and the next one is accepted."""
    with pytest.raises(PeerLostError, match="does not know this job's secret"):
        dial(listener.address, b"another job's", RankGreeting(1), 5)
    with stranger(listener) as end:
        end.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
        assert shut(end)
    with stranger(listener) as end:  # who knows how it goes, but not the secret
        end.sendall(b"choros 1" + b"x" * 16)
        assert len(end.recv(48)) == 48
        end.sendall(b"\0" * 32 + (2).to_bytes(4, "little") + b"{}")
        assert shut(end)
    with stranger(listener) as end:  # a greeting that is too long
        end.sendall(b"choros 1" + b"x" * 16 + b"\0" * 32 + (1 << 31).to_bytes(4, "little"))
        end.recv(48)
        assert shut(end)
    silent = stranger(listener)
    came(listener)
    far = dial(listener.address, SECRET, RankGreeting(2), 5)
    greeting, near = listener.next_peer(5)
    assert greeting.rank == 2
    for end in (silent, far, near):
        end.close()


@pytest.mark.parametrize(
    "header",
    [
        [1],
        "RankGreeting",
        None,
        {},
        {"op": "RankGreeting", "host": "n1"},
        {"op": "RankGreeting", "rank": "1", "host": "n1"},
        {"op": "RankGreeting", "rank": 1, "host": "n1", "more": 0},
        {"op": "ProcessGreeting", "member": 1},
    ],
)
def test_a_bad_greeting_of_a_process_with_the_secret_is_rejected(listener, monkeypatch, capfd, header):
    with monkeypatch.context() as patch:
        patch.setattr(auth_socket, "header_of", lambda greeting: greeting)
        with pytest.raises(PeerLostError, match="need the same version of Choros"):
            dial(listener.address, SECRET, header, 5)
    with dial(listener.address, SECRET, RankGreeting(2), 5):
        greeting, near = listener.next_peer(5)
        near.close()
    assert greeting.rank == 2
    assert "its greeting is not of this version of Choros (InvalidInputError: " in capfd.readouterr().err


def test_what_was_overheard_opens_no_door(listener, monkeypatch):
    drawn, sign = [], auth_socket._sign
    monkeypatch.setattr(auth_socket, "_sign", lambda *message: drawn.append(sign(*message)) or drawn[-1])
    far = dial(listener.address, SECRET, RankGreeting(1), 5)
    listener.next_peer(5)[1].close()
    far.close()
    for proof in [*drawn]:
        with stranger(listener) as end:
            end.sendall(b"choros 1" + b"x" * 16)
            end.recv(48)
            end.sendall(proof + (11).to_bytes(4, "little") + b'{"rank": 1}')
            assert shut(end)
    came(listener)


def test_who_was_not_taken_when_the_door_closes_is_turned_away(listener):
    with dial(listener.address, SECRET, RankGreeting(1), 5) as far:
        listener.close()
        far.settimeout(5)
        assert shut(far)


def test_silent_ones_give_way_to_others(listener, monkeypatch, capfd):
    monkeypatch.setattr(auth_socket, "_MAX_HANDSHAKES", 8)
    silent = [stranger(listener) for _ in range(40)]
    until(lambda: len(guests()) <= 9)
    far = dial(listener.address, SECRET, RankGreeting(1), 5)
    greeting, near = listener.next_peer(5)
    assert greeting.rank == 1
    for end in (*silent, far, near):
        end.close()
    until(lambda: not guests())
    stderr = capfd.readouterr().err
    assert re.match(
        r"choros: \d+ peers? that did not know this job's secret w\w+ rejected at 127\S+, the last from 127", stderr
    )
    assert stderr.count("\n") == 1  # one line in ten seconds
    assert SECRET.hex() not in stderr


def test_one_who_sends_a_byte_now_and_then_has_ten_seconds_in_all(listener, monkeypatch):
    monkeypatch.setattr(auth_socket, "_HANDSHAKE_SECONDS", 0.5)
    with stranger(listener) as end:
        begun = time.monotonic()
        while time.monotonic() - begun < 8:
            try:
                end.sendall(b"c")
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - begun < 5


def test_ranks_come_in_while_strangers_flood(listener):
    over, sent = threading.Event(), [0]
    overheard = b"choros 1" + os.urandom(16)
    attacks = (b"", b"GET / HTTP/1.1\r\n\r\n", overheard, overheard + os.urandom(32) + b"\xff" * 4, os.urandom(70_000))

    def flood():
        while not over.is_set():
            try:
                with stranger(listener) as end:
                    end.sendall(attacks[sent[0] % len(attacks)])
            except OSError:
                pass
            sent[0] += 1
            time.sleep(0.005)

    attackers = [threading.Thread(target=flood) for _ in range(2)]
    for each in attackers:
        each.start()
    for number in range(30):
        far = dial(listener.address, SECRET, RankGreeting(number), 20)
        greeting, near = listener.next_peer(20)
        assert greeting.rank == number
        far.close()
        near.close()
        time.sleep(0.02)
    over.set()
    for each in attackers:
        each.join(10)
    assert sent[0] > 30
    until(lambda: not guests())


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff\xff",
        b"\x02\0\0\0{}",
        b"\x02\0\0\0[]",
        b"[[[[",
        json.dumps([{}, [["float32", -4]]]),
        json.dumps([{}, [["float32", 1.5]]]),
        json.dumps([{}, [["float64", 1 << 60]]]),
        json.dumps([{}, [["V8", 1]]]),
        json.dumps([{}, [[{"names": []}, 1]]]),
        json.dumps([{}, 3]),
        "[" * 100_000,
        json.dumps([{"error": "MemoryError"}, []]),
    ],
)
def test_what_is_no_message_is_named_so(message):
    """Of one who knows the secret but speaks otherwise: an error with a name, and no memory taken on his word."""
    if isinstance(message, str):
        message = len(message).to_bytes(4, "little") + message.encode()
    near, two = socket.socketpair()
    with near, two:
        near.sendall(message)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLostError, match="a rank"):
            RpcConnection(two, "a rank", 5).receive()


EXHAUSTED = """
import os, resource, secrets, socket, sys, time
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, dial
secret = secrets.token_bytes(32)
with AuthListener("127.0.0.1", secret, RankGreeting) as listener:
    host, port = listener.address.split(":")
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, used + 6))
    held = [os.dup(0) for _ in range(5)]
    waiting = socket.socket()
    waiting.connect((host, int(port)))  # is heard, and cannot be let in: no descriptor is left
    time.sleep(0.5)
    waiting.close()
    for fd in held:
        os.close(fd)
    end = dial(listener.address, secret, RankGreeting(1), 5)
    print(listener.next_peer(5)[0])
"""


def test_a_door_without_descriptors_lets_others_in_when_there_are_some_again():
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=60, check=True)
    assert "RankGreeting(rank=1" in done.stdout
    assert done.stderr.count("no peer can connect to 127.0.0.1") == 1
    assert "ulimit -n" in done.stderr


def test_own_processes_may_open_as_many_files_as_the_hard_limit_allows():
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 4096))"
    run = "import sys; from choros.cli import main; main(['run', '-n', '1', sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit}; {run}", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == "4096"


def test_a_forked_child_does_not_hide_its_parents_death(listener):
    """As of a data loader or multiprocessing, which may outlive a rank that is killed."""
    script = """
        import os, sys, time
        from choros.comm.tcp.auth_socket import RankGreeting, dial

        end = dial(sys.argv[1], bytes.fromhex(sys.argv[2]), RankGreeting(1), 10.0)
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        print("forked", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), listener.address, SECRET.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as rank:
        _, end = listener.next_peer(20.0)
        assert rank.stdout.readline() == b"forked\n"
        rank.kill()
        rank.wait()
        begun = time.monotonic()
        end.settimeout(10.0)
        try:
            assert shut(end)
            assert time.monotonic() - begun < 2.0
        finally:
            end.close()
            os.killpg(rank.pid, signal.SIGKILL)  # the child
