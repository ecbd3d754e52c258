"""The program of a rank closes what it opened, whatever fails, and leaves a replica of its caller open."""

import types

import pytest

from choros.algorithms import Single
from choros.comm.single_rank_group import SingleRankGroup
from choros.errors import CommTimeoutError, PeerLostError
from choros.training.spec import FitConfig, FitRequest
from choros.training.worker import rank_program
from choros.training.worker.comm_setup import CommHandles
from choros.training.worker.loop import train
from choros.training.worker.rank_program import run_rank


class Closing:
    def __init__(self, name, closed):
        self.name, self.closed = name, closed

    def close(self):
        self.closed.append(self.name)

    def fold_seeds(self, rank, seed): ...

    def seed_generators(self, rank, seed): ...


def request():
    source = types.SimpleNamespace(sample=lambda batch_size: None)
    written = types.SimpleNamespace(unpack=lambda: None)
    return FitRequest(None, Single(), FitConfig({}, "sync", 1, 4, 1), source, None, None, written, 0.0)


@pytest.mark.parametrize("failing", ["connect", "train", ""])
@pytest.mark.parametrize("saved", [False, True])
def test_what_was_opened_is_closed_the_last_first(monkeypatch, failing, saved):
    closed = []
    replica = Closing("replica", closed)
    monkeypatch.setattr(rank_program, "build_replica", lambda *_: replica)

    def connect(connected):
        assert connected is replica
        if failing == "connect":
            raise OSError(failing)
        return CommHandles(SingleRankGroup(), None, None, resources=[Closing("board", closed)])

    def train(context, comm):
        assert closed == []
        assert (context.rank, context.replica, context.group) == (0, replica, comm.group)
        if failing == "train":
            raise OSError(failing)
        return "trained"

    def run():
        return run_rank(request(), 0, connect, train, replica=replica if saved else None)

    if failing:
        with pytest.raises(OSError, match=failing):
            run()
    else:
        assert run() == "trained"
    assert closed == ([] if failing == "connect" else ["board"]) + ([] if saved else ["replica"])


def test_the_first_error_is_raised_where_the_center_cannot_be_read_after_it(monkeypatch):
    class Loop:
        def __init__(self, run):
            pass

        def train(self):
            raise CommTimeoutError("The center's server on b did not answer for 4 s.")

        def write_last(self):
            raise PeerLostError("The center's server on b has gone.")

    monkeypatch.setattr(train, "AsyncLoop", Loop)
    job = types.SimpleNamespace(synchronous=False)
    run = types.SimpleNamespace(job=job, profiler=None, write_trainable=None)
    with pytest.raises(CommTimeoutError, match="did not answer"):
        train.train(run)
