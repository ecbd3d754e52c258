"""Errors keep what they hold when they are pickled."""

import copy
import importlib
import pickle

import numpy as np
import pytest

from choros.errors import CallsDifferError, CheckpointError, ChorosError, CommTimeoutError, WorkerFailedError

for name in ("hvd", "launch.schedulers.commands", "comm.tcp.auth_socket", "training.executors.local"):
    importlib.import_module(f"choros.{name}")  # some define errors of their own


def kinds(root):
    return [root, *(each for kind in root.__subclasses__() for each in kinds(kind))]


@pytest.mark.parametrize("kind", dict.fromkeys(kinds(ChorosError)), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickle_with_all_that_it_holds(kind):
    error = kind.__new__(kind, "what happened")
    error.args = ("what happened",)
    error.rank, error.more = 3, {"a": np.arange(3)}
    error.add_note("and what to do")
    reloaded = pickle.loads(pickle.dumps(error))
    assert (type(reloaded), str(reloaded), reloaded.rank, reloaded.__notes__) == (
        kind,
        str(error),
        3,
        ["and what to do"],
    )
    np.testing.assert_array_equal(reloaded.more["a"], [0, 1, 2])


def test_fields_survive():
    failed = WorkerFailedError(
        "worker 1 was killed", rank=1, host="a", signal="SIGKILL", peak_memory=7, output="last", weights=[np.ones(2)]
    )
    for again in (pickle.loads(pickle.dumps(failed)), copy.copy(failed)):
        assert str(again) == "worker 1 was killed"
        assert vars(again).keys() == vars(failed).keys()
        assert (again.rank, again.host, again.signal, again.peak_memory) == (1, "a", "SIGKILL", 7)
        np.testing.assert_array_equal(again.weights[0], [1, 1])
    assert pickle.loads(pickle.dumps(CommTimeoutError("late", (1, 2)))).missing == (1, 2)
    assert pickle.loads(pickle.dumps(CallsDifferError("other", [(1, 2, 3, 4)]))).posted == [(1, 2, 3, 4)]
    full = pickle.loads(pickle.dumps(CheckpointError(28, "No space left", "state/000.choros", None, "state")))
    assert (full.errno, full.strerror, full.filename, full.filename2) == (
        28,
        "No space left",
        "state/000.choros",
        "state",
    )
    assert str(full) == "[Errno 28] No space left: 'state/000.choros' -> 'state'"
