"""Messages from one process to several, through shared memory."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from choros.comm.shm.futex import POLL_SECONDS
from choros.comm.shm.ring_buffer import Ring
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError, InvalidDataError, PeerLostError


def fill(value):
    def write(memory):
        memory[:] = value

    return write


def patient(waited):
    assert waited < 30


def reads(fd, reader, count, pause, queue):
    ring = Ring(Segment.open_peer(os.getppid(), fd), 2, 3)
    seen = []
    for _ in range(count):
        message = ring.take(reader, 30.0)
        time.sleep(pause)  # the message must stay as it is meanwhile
        seen.append((len(message), int(message.sum())))
        del message
        ring.release(reader)
    queue.put((reader, seen))


def test_every_reader_gets_every_message_however_slow_it_is():
    ring = Ring.create(readers=2, depth=3, nbytes=1000)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    pauses = (0.0, 0.01)
    readers = [context.Process(target=reads, args=(ring.segment.fd, r, 50, pauses[r], queue)) for r in range(2)]
    for reader in readers:
        reader.start()
    for number in range(50):
        ring.put(number + 1, fill(number), patient)
    result = dict(queue.get(timeout=30) for _ in readers)
    for reader in readers:
        reader.join(10)
    assert result[0] == result[1] == [(n + 1, n * (n + 1)) for n in range(50)]
    ring.close()


def test_a_writer_waits_for_room_and_can_give_up():
    ring = Ring.create(readers=1, depth=2, nbytes=64)
    for number in range(2):
        ring.put(64, fill(number), patient)

    def give_up(waited):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ring.put(64, fill(2), give_up)
    threading.Timer(0.1, lambda: (ring.take(0, 1.0), ring.release(0))).start()
    ring.put(64, fill(2), patient)
    assert [int(ring.take(0, 1.0)[0]) for _ in range(1)] == [1]
    ring.close()


def test_a_writer_that_waits_long_sleeps_between_its_checks():
    ring = Ring.create(readers=1, depth=1, nbytes=64)
    ring.put(64, fill(0), patient)
    waits = []

    def check(waited):
        waits.append(waited)
        if waited > 1.3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        ring.put(64, fill(1), check)
    assert len(waits) <= 1.3 / POLL_SECONDS + 3
    ring.close()


def test_a_reader_is_told_when_nothing_comes():
    ring = Ring.create(readers=1, depth=2, nbytes=64)
    with pytest.raises(CommTimeoutError, match="No batch came from the data for"):
        ring.take(0, 0.1)
    ring.leave()
    with pytest.raises(PeerLostError, match="reads the data has stopped"):
        ring.take(0, 5.0)
    ring.close()


def test_what_is_longer_than_a_slot_is_refused():
    ring = Ring.create(readers=1, depth=2, nbytes=64)
    with pytest.raises(InvalidDataError, match="give batches of more equal size"):
        ring.put(10_000, fill(0), patient)
    ring.put(0, lambda memory: None, patient)
    assert not len(ring.take(0, 1.0))
    assert np.frombuffer(ring.take(0, 1.0), np.uint8).size == 0
    ring.close()
