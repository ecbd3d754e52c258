"""The driver's end of an elastic job's sockets: a process that reads nothing keeps nobody else waiting."""

import threading
import time

import pytest

from choros.comm.messages import header_of
from choros.comm.tcp.auth_socket import AuthListener, dial
from choros.comm.tcp.rpc import RpcConnection
from choros.launch.elastic.control_server import ControlServer
from choros.launch.elastic.messages import Connected, GenerationBroken, Ping, ProcessGreeting

SECRET = b"of this test"


@pytest.fixture
def control_server():
    made = ControlServer(AuthListener("127.0.0.1", SECRET, ProcessGreeting))
    yield made
    made.close()


def come(control_server, number):
    """A process of the job, once the control server has let it in."""
    socket = dial(control_server.address, SECRET, ProcessGreeting(number), 5.0)
    channel = RpcConnection(socket, "the control server", 10.0)
    assert control_server.received.get(timeout=10.0) == (number, Connected())
    return channel


def test_a_process_that_reads_nothing_keeps_no_other_waiting_and_is_dropped(control_server):
    stuck, other = come(control_server, 0), come(control_server, 1)
    notices = []

    def drive():
        notices.extend(control_server.send(0, GenerationBroken(1, "x" * (1 << 20))) for _ in range(100))
        notices.append(control_server.send(1, Ping()))

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    assert other.receive()[0] == header_of(Ping())
    driver.join(10.0)  # the message may arrive before send has returned
    assert notices[0]
    assert not notices[99]  # nothing more is kept for it
    assert notices[100]
    assert control_server.received.empty()
    stuck.close()
    other.close()


def test_what_was_told_last_arrives_before_the_desk_closes(control_server):
    other = come(control_server, 0)
    message = GenerationBroken(1, "x" * (1 << 22))
    assert control_server.send(0, message)
    closing = threading.Thread(target=control_server.close)
    closing.start()
    assert other.receive()[0] == header_of(message)
    closing.join(10.0)
    assert not closing.is_alive()
    other.close()


def test_the_desk_closes_though_a_process_reads_nothing(control_server):
    stuck = come(control_server, 0)
    control_server.send(0, GenerationBroken(1, "x" * (1 << 24)))
    begun = time.monotonic()
    control_server.close()
    assert time.monotonic() - begun < 5
    stuck.close()
