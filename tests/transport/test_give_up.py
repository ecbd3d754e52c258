"""A group that another thread gives up while its own rank waits, or leaves."""

import os
import threading

import numpy as np
import pytest

from choros.comm.shm.group import SharedGroup
from choros.comm.tcp.group import TcpGroup
from choros.errors import PeerLostError


@pytest.fixture(params=["shared memory", "sockets"])
def pair(request):
    """Two ranks of a group, in one process."""
    if request.param == "shared memory":
        with SharedGroup.create(2, 1 << 16) as segment:
            yield [SharedGroup(segment, rank) for rank in range(2)]
        return
    output, all_said, made = [b"", b""], threading.Barrier(2, timeout=30), [None, None]

    def swap(rank, vector):
        output[rank] = vector
        all_said.wait()
        return output

    def join(rank):
        made[rank] = TcpGroup(rank, 2, lambda vector: swap(rank, vector), b"a secret of the test", timeout=30.0)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join(30)
    yield made
    for group in made:
        group.close()


def test_a_wait_ends_with_the_reason_and_later_ones_too(pair):
    waiting, messages = pair[0], []

    def wait():
        try:
            waiting.sum(np.ones(3))
        except PeerLostError as error:
            messages.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert not pair[0].broken
    pair[0].give_up("rank 1 was ended by SIGKILL")
    thread.join(30)
    assert "rank 1 was ended by SIGKILL" in messages[0]
    assert "rank 1 was ended by SIGKILL" in pair[0].broken
    with pytest.raises(PeerLostError, match="rank 1 was ended by SIGKILL"):
        waiting.barrier()


def test_who_has_left_gives_nothing_up(pair):
    for group in pair:
        group.close()
    pair[0].give_up("too late")
    pair[0].close()


def test_giving_up_beside_leaving():
    for _ in range(50):
        with SharedGroup.create(2, 1 << 12) as segment:
            group = SharedGroup(os.dup(segment.fd), 0)
        thread = threading.Thread(target=group.give_up, args=("at once",))
        thread.start()
        group.close()
        thread.join(30)
