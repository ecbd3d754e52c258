"""Logs of a batch travel as numbers of a pipe, once both ends know their names."""

import os
import select

import pytest

from choros.launch.process.unix_socket import UnixConnection
from choros.launch.process.worker_connection import WorkerConnection
from choros.training.executors.batch_channel import BatchChannel, WorkerBatchChannel


@pytest.fixture
def ends():
    ours, expected = UnixConnection.pair()
    channel = BatchChannel()
    worker = WorkerBatchChannel(WorkerConnection(expected, 0, 1), [os.dup(fd) for fd in channel.fds])
    yield channel, worker, ours
    for end in (channel, worker, ours, expected):
        end.close()


def test_the_first_logs_teach_names_and_later_ones_are_records(ends):
    channel, worker, _ = ends
    logs = {"loss": 0.5, "accuracy": 1 / 3}
    assert not worker.report(0, 0, logs)
    channel.learn(logs)
    assert worker.report(3, 17, {"loss": 1e300, "accuracy": float("inf")})
    assert channel.read() == (3, 17, {"loss": 1e300, "accuracy": float("inf")})


@pytest.mark.parametrize(
    "logs",
    [{"loss": 0.5, "other": 1.0}, {"accuracy": 1.0, "loss": 0.5}, {"loss": 0.5, "accuracy": [1.0]}, {}],
    ids=["another name", "another order", "no number", "nothing"],
)
def test_other_logs_take_the_socket(ends, logs):
    channel, worker, _ = ends
    worker.report(0, 0, {"loss": 0.5, "accuracy": 1.0})
    assert not worker.report(0, 1, logs)
    assert not select.select([channel.records], [], [], 0)[0]


def test_too_many_numbers_for_one_record_take_the_socket(ends):
    _, worker, _ = ends
    logs = {f"metric {number}": 0.0 for number in range(600)}
    assert [worker.report(0, step, logs) for step in range(3)] == [False] * 3


def test_an_answer_is_one_byte_or_a_frame_of_the_socket(ends):
    channel, worker, ours = ends
    channel.send_no_change()
    assert worker.no_change_arrived()
    ours.send({"control": {}})
    assert not worker.no_change_arrived()
    assert not worker.no_change_arrived()  # the frame is still there


def test_a_caller_that_has_gone_ends_the_wait(ends):
    _, worker, ours = ends
    ours.close()
    assert not worker.no_change_arrived()
