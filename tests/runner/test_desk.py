"""The driver's end of an elastic job's sockets: a process that reads nothing keeps nobody else waiting."""

import threading
import time

import pytest

from choros.comm.tcp.auth_socket import AuthListener, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.launch.elastic.control_server import ControlServer

SECRET = b"of this test"


@pytest.fixture
def desk():
    made = ControlServer(AuthListener("127.0.0.1", SECRET))
    yield made
    made.close()


def come(desk, number):
    """A process of the job, once the desk has let it in."""
    channel = RpcConnection(dial(desk.place, SECRET, {"member": number}, 5.0), "the desk", 10.0)
    assert desk.heard.get(timeout=10.0) == (number, {"say": "here"})
    return channel


def test_a_process_that_reads_nothing_keeps_no_other_waiting_and_is_dropped(desk):
    stuck, other = come(desk, 0), come(desk, 1)
    told = []

    def drive():
        told.extend(desk.tell(0, {"say": "x" * (1 << 20)}) for _ in range(100))
        told.append(desk.tell(1, {"say": "good day"}))

    threading.Thread(target=drive, daemon=True).start()
    assert other.receive()[0] == {"say": "good day"}
    assert told[0]
    assert not told[99]  # nothing more is kept for it
    assert told[100]
    assert desk.heard.empty()
    stuck.close()
    other.close()


def test_what_was_told_last_arrives_before_the_desk_closes(desk):
    other = come(desk, 0)
    text = "x" * (1 << 22)
    assert desk.tell(0, {"say": text})
    closing = threading.Thread(target=desk.close)
    closing.start()
    assert other.receive()[0] == {"say": text}
    closing.join(10.0)
    assert not closing.is_alive()
    other.close()


def test_the_desk_closes_though_a_process_reads_nothing(desk):
    stuck = come(desk, 0)
    desk.tell(0, {"say": "x" * (1 << 24)})
    begun = time.monotonic()
    desk.close()
    assert time.monotonic() - begun < 5
    stuck.close()
