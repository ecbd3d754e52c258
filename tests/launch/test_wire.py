import os
import socket
import struct
import threading
import time

import numpy as np
import pytest

from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError
from choros.launch.process import frame
from choros.launch.process.unix_socket import UnixConnection


@pytest.fixture
def ends():
    left, right = UnixConnection.pair()
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def raw():
    """A wire and the bare socket at its other end."""
    left, right = socket.socketpair()
    wire = UnixConnection(left, "worker 1 of 2")
    yield wire, right
    wire.close()
    right.close()


def test_a_message_with_blobs_of_every_kind(ends):
    left, right = ends
    values = np.arange(6, dtype="float32").reshape(2, 3)
    left.send({"a": [1, None, "é"], "nan": float("inf")}, [b"", b"abc", bytearray(b"d"), values, np.zeros((0, 3))])
    message, blobs, fds = right.receive(1)
    assert message == {"a": [1, None, "é"], "nan": float("inf")}
    assert [bytes(blob) for blob in blobs] == [b"", b"abc", b"d", values.tobytes(), b""]
    assert fds == []


def test_messages_stay_in_order_and_whole(ends):
    left, right = ends
    for number in range(100):
        left.send({"n": number}, [bytes([number])] * (number % 4))
    for number in range(100):
        assert right.receive(1) == ({"n": number}, [bytes([number])] * (number % 4), [])


def test_descriptors_belong_to_their_message(ends):
    left, right = ends
    made = [os.memfd_create(f"test{number}") for number in range(3)]
    for number, fd in enumerate(made):
        os.write(fd, b"%d" % number)
    left.send({"n": 0}, [b"x" * 100_000], made[:2])
    left.send({"n": 1})
    left.send({"n": 2}, fds=made[2:])
    for fd in made:
        os.close(fd)
    results = []
    for _ in range(3):
        message, _, fds = right.receive(1)
        assert not any(os.get_inheritable(fd) for fd in fds)
        results.append((message["n"], [os.pread(fd, 10, 0) for fd in fds]))
        for fd in fds:
            os.close(fd)
    assert results == [(0, [b"0", b"1"]), (1, []), (2, [b"2"])]


def test_many_descriptors_and_not_one_more(ends):
    left, right = ends
    fd = os.memfd_create("test")
    left.send({}, fds=[fd] * frame.MOST_FDS)
    _, _, fds = right.receive(1)
    assert len(fds) == frame.MOST_FDS
    with pytest.raises(InvalidInputError, match="250 descriptors, this one has 251"):
        left.send({}, fds=[fd] * (frame.MOST_FDS + 1))
    for each in [*fds, fd]:
        os.close(each)


def test_descriptors_nobody_asked_for_are_closed_with_the_wire():
    left, right = UnixConnection.pair()
    fd = os.memfd_create("test")
    left.send({}, fds=[fd])
    assert right.poll()
    os.close(fd)
    left.close()
    right.close()


@pytest.mark.parametrize(
    ("message", "blobs", "fds", "text"),
    [
        ({"x": {1, 2}}, (), (), "only what JSON has"),
        ([1], (), (), "must be a dict"),
        ({}, ["text"], (), "contiguous buffer"),
        ({}, [np.zeros((4, 4))[:, ::2]], (), "contiguous buffer"),
        ({}, (), [12345], "12345 is not an open descriptor"),
        ({}, [b""] * (frame.MOST_BLOBS + 1), (), "65536 blobs"),
        ({"x": "x" * frame.MOST_HEAD}, (), (), "bytes of JSON"),
    ],
)
def test_what_cannot_travel_is_refused_and_nothing_is_sent(ends, message, blobs, fds, text):
    left, right = ends
    with pytest.raises(InvalidInputError, match=text):
        left.send(message, blobs, fds)
    left.send({"after": 1})
    assert right.receive(1)[0] == {"after": 1}


def test_nothing_comes(ends):
    began = time.monotonic()
    with pytest.raises(CommTimeoutError, match=r"sent nothing for 0\.1 s"):
        ends[0].receive(0.1)
    assert 0.1 <= time.monotonic() - began < 5
    assert not ends[0].poll()


def test_a_peer_that_has_gone(ends):
    left, right = ends
    left.send({"last": 1})
    left.close()
    assert right.receive(1)[0] == {"last": 1}
    assert right.poll()
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"has closed the connection$"):
            right.receive(1)
    with pytest.raises(PeerLostError, match="closed the connection"):
        right.send({})
    with pytest.raises(PeerLostError, match="broken off"):
        right.send({})


def test_a_peer_that_goes_in_mid_message(raw):
    wire, other = raw
    head, _ = frame.pack({"x": 1}, [b"abcdef"])
    other.sendall(head + b"abc")
    assert not wire.poll()
    other.close()
    with pytest.raises(PeerLostError, match="worker 1 of 2 has closed the connection in mid-message"):
        wire.receive(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n", "does not begin as one"),
        (frame.PREFIX.pack(frame.MAGIC, 1 << 31, 0, 0), "more than a message may have"),
        (frame.PREFIX.pack(frame.MAGIC, 2, 1, 0), "more than a message may have"),
        (frame.PREFIX.pack(frame.MAGIC, 10, 1, 0) + struct.pack("<Q", 1 << 60) + b"{}", "more bytes"),
        (frame.PREFIX.pack(frame.MAGIC, 2, 0, 0) + b"[]", "not a JSON object"),
        (frame.PREFIX.pack(frame.MAGIC, 2, 0, 0) + b"{x", "Expecting"),
        (frame.PREFIX.pack(frame.MAGIC, 2, 0, 3) + b"{}", "3 descriptors and 0 arrived"),
    ],
)
def test_what_is_no_message(raw, data, message):
    wire, other = raw
    other.sendall(data)
    with pytest.raises(PeerLostError, match=message):
        wire.receive(1)


def test_a_message_in_crumbs(raw):
    wire, other = raw
    head, _ = frame.pack({"x": 1}, [b"ab", b"c"])
    for byte in head + b"abc":
        assert not wire.poll()
        other.sendall(bytes([byte]))
    assert wire.receive(1) == ({"x": 1}, [b"ab", b"c"], [])


def test_two_ends_that_both_send_much_do_not_deadlock(ends):
    blob = b"x" * 5_000_000
    got = {}

    def exchange(number):
        ends[number].send({"n": number}, [blob])
        got[number] = ends[number].receive(20)

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {0: ({"n": 1}, [blob], []), 1: ({"n": 0}, [blob], [])}


def test_a_peer_that_reads_nothing(raw):
    wire, _ = raw
    with pytest.raises(CommTimeoutError, match=r"worker 1 of 2 has read nothing for 0\.2 s"):
        wire.send({}, [b"x" * 5_000_000], stalled=0.2)
    with pytest.raises(PeerLostError, match="broken off"):
        wire.send({})


def test_sends_of_many_threads_do_not_mix(ends):
    left, right = ends
    count, each = 4, 25

    def send(number):
        for _ in range(each):
            left.send({"n": number}, [bytes([number]) * 20_000])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    seen = [0] * count
    for _ in range(count * each):
        message, blobs, _ = right.receive(10)
        assert bytes(blobs[0]) == bytes([message["n"]]) * 20_000
        seen[message["n"]] += 1
    for thread in threads:
        thread.join(10)
    assert seen == [each] * count
