"""BeforeTimeLimit: processes that are told of the limit save, end, and go on in another turn."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest

import choros
from choros.callbacks import BeforeTimeLimit
from choros.errors import InvalidInputError

PRELUDE = """
import json, os, sys, time
import keras, numpy as np
import choros, choros.hvd as hvd
from choros.callbacks import BeforeTimeLimit

where = sys.argv[1]
rng = np.random.default_rng(7)
x, y = rng.normal(size=(64, 4)).astype("float32"), rng.normal(size=64).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])

class Slowly(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
    def on_train_batch_end(self, batch, logs=None):
        print("batch", batch, flush=True)
        time.sleep(float(os.environ.get("SLOW", 0)))
"""
PLAIN = """
model.compile("adam", "mse")
model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[BeforeTimeLimit(where), Slowly()])
print("done", int(model.optimizer.iterations), flush=True)
"""
TRAINER = """
model.compile("adam", "mse")
trainer = choros.Trainer(model, "allreduce", workers=2)
trainer.fit(x, y, batch_size=8, epochs=4, verbose=0, seed=1, callbacks=[BeforeTimeLimit(where), Slowly()])
print("done", int(model.optimizer.iterations), model.get_weights()[0].tobytes().hex(), flush=True)
"""
HVD = """
hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
data = hvd.shard(x, y, per_rank_batch_size=4)
model.fit(data, epochs=4, verbose=0, callbacks=[BeforeTimeLimit(where), Slowly()], validation_data=data)
print("done", int(model.optimizer.iterations), flush=True)
"""


class Turn:
    """A script in a process of its own, whose lines are read as they come."""

    def __init__(self, script, where, ranks=0, **environment):
        command = ["-c", textwrap.dedent(PRELUDE + script)]
        if ranks:
            path = where.parent / "script.py"
            path.write_text(PRELUDE + script)
            cli = "import sys; from choros.cli import main; sys.exit(main(sys.argv[1:]))"
            command = ["-c", cli, "run", "-n", str(ranks), str(path)]
        self.process = subprocess.Popen(
            [sys.executable, *command, str(where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        )
        self.said = []

    def until(self, text):
        for line in self.process.stdout:
            self.said.append(line.strip())
            if text in line:
                return self
        raise AssertionError(f"{text!r} was not said: {self.said}\n{self.process.stderr.read()}")

    def ends(self, code):
        out, errors = self.process.communicate(timeout=120)
        self.said += out.splitlines()
        assert self.process.returncode == code, errors
        self.errors = errors
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def states(where):
    return sorted(path.name for path in where.iterdir())


def test_a_plain_fit_is_cut_short_and_goes_on(tmp_path):
    where = tmp_path / "state"
    with Turn(PLAIN, where, SLOW="0.3") as turn:
        turn.until("epoch 1").until("batch 2")
        turn.process.send_signal(signal.SIGUSR2)
        turn.ends(75)
    assert "choros: the time limit is near: epoch 2, after " in turn.errors
    assert not any("done" in line for line in turn.said)
    (state,) = states(where)
    facts = json.loads((where / state / "choros.json").read_text())
    assert facts["epoch"] == 1
    assert 3 <= facts["batch"] < 8
    with Turn(PLAIN, where) as turn:
        turn.ends(0)
    assert [line for line in turn.said if "epoch" in line] == ["epoch 1", "epoch 2", "epoch 3"]
    assert turn.said[-1] == f"done {8 + facts['batch'] + 24}"  # the optimizer's count was saved too
    assert not where.exists()


def test_the_clock_is_looked_at_and_the_scripts_file_left(tmp_path):
    where, requested = tmp_path / "state", tmp_path / "again"
    with Turn(PLAIN, where, SLOW="0.05", CHOROS_STOP_AT=str(time.time()), CHOROS_REQUEUE=str(requested)) as turn:
        turn.ends(0)
    assert requested.exists()
    assert [line for line in turn.said if line.startswith(("epoch", "batch"))] == ["epoch 0"]  # no second step
    assert BeforeTimeLimit(where).point() == (0, 1)


@pytest.mark.long
def test_turns_that_all_end_in_one_epoch_come_to_an_end(tmp_path):
    where, requested = tmp_path / "state", tmp_path / "again"
    environment = {"CHOROS_STOP_AT": str(time.time()), "CHOROS_REQUEUE": str(requested)}
    codes = []
    for _ in range(4):
        requested.unlink(missing_ok=True)
        with Turn(PLAIN, where, **environment) as turn:
            turn.process.wait(120)
            codes.append((turn.process.returncode, requested.exists()))
            errors = turn.process.stderr.read()
    assert codes == [(0, True)] * 3 + [(1, False)]
    assert "the job is not requeued: 4 jobs in a row ended in epoch 1" in errors


@pytest.mark.long
def test_a_trainer_goes_on_with_the_next_batch_to_the_same_weights(tmp_path):
    where = tmp_path / "state"
    with Turn(TRAINER, tmp_path / "other") as turn:
        expected = turn.ends(0).said[-1]
    with Turn(TRAINER, where, SLOW="0.3") as turn:
        turn.until("epoch 1").until("batch 2")
        turn.process.send_signal(signal.SIGUSR2)
        turn.ends(75)
    epoch, batch = BeforeTimeLimit(where).point()
    assert epoch == 1
    assert 3 <= batch < 8
    with Turn(TRAINER, where) as turn:
        turn.ends(0)
    steps = [line for line in turn.said if line.startswith(("epoch", "batch"))]
    assert steps[:2] == ["epoch 1", f"batch {batch}"]
    assert turn.said[-1] == expected
    assert not where.exists()


@pytest.mark.parametrize("script", [HVD, TRAINER], ids=["hvd", "trainer"])
def test_ranks_end_together_when_one_is_told(script, tmp_path):
    """Told is only the last rank; rank 0 writes."""
    where, mark = tmp_path / "state", f"CHOROS_TEST_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    with Turn(script, where, 2, SLOW="0.3", CHOROS_REQUEUE=str(tmp_path / "again"), **{name: value}) as turn:
        turn.until("epoch 0")
        notified_rank = rank_process(mark, 1 if script is HVD else 0)  # a Trainer's callbacks are on rank 0
        turn.until("epoch 1").until("batch 2")
        os.kill(notified_rank, signal.SIGUSR2)
        turn.ends(0)
    assert (tmp_path / "again").exists()
    assert not any("done" in line for line in turn.said)
    assert BeforeTimeLimit(where).point()[0] == 1
    with Turn(script, where, 2) as turn:
        turn.ends(0)
    assert sorted({line.split("epoch ")[1] for line in turn.said if "epoch" in line}) == ["1", "2", "3"]
    assert len({line.split("done ")[1] for line in turn.said if "done" in line}) == 1
    assert not where.exists()


def rank_process(mark, rank):
    """The process of a rank, by its environment."""
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            command = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in command and f"CHOROS_RANK={rank}" in command:
            return int(path.parent.name)
    raise AssertionError(f"no process of rank {rank}")


def test_a_state_that_was_not_finished_does_not_count(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    limit = BeforeTimeLimit(tmp_path)
    limit.set_params({"epochs": 9, "steps": 2})
    limit.set_model(model)
    limit.on_train_begin()
    for epoch in (0, 1):
        limit.on_epoch_end(epoch)
    assert states(tmp_path) == ["state-00000002"]
    saved = [np.array(w) for w in model.get_weights()]
    (tmp_path / "new-1").mkdir()  # as a process that was killed leaves it
    model.set_weights([w + 1 for w in saved])
    repeated = BeforeTimeLimit(tmp_path)
    repeated.restore(model)
    assert repeated.point() == (2, 0)
    for old, new in zip(saved, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(("batch", "code"), [(0, 1), (5, 0)])
def test_turns_that_get_on_within_an_epoch_are_not_counted(batch, code, tmp_path, monkeypatch):
    """After three that ended in it: an epoch that begins anew does so for the last time, one that goes on does not."""
    monkeypatch.setenv("CHOROS_REQUEUE", str(tmp_path / "again"))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    limit = BeforeTimeLimit(tmp_path / "state")
    limit.set_params({"epochs": 9, "steps": 100})
    limit.set_model(model)
    limit.on_train_begin()
    limit.on_epoch_end(0)
    (facts,) = (tmp_path / "state").glob("*/choros.json")
    facts.write_text(json.dumps({"epoch": 1, "batch": 5, "turns": 3}))
    limit.restore(model, batch)
    limit.on_train_begin()
    limit.on_epoch_begin(1)
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(SystemExit) as ending:
        limit.on_train_batch_end(batch)
    assert ending.value.code == code
    assert (tmp_path / "again").exists() == (code == 0)
    assert limit.point() == (1, batch + 1)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_what_cannot_work(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="SIGNONE is not a signal"):
        BeforeTimeLimit(tmp_path, signals=["SIGNONE"])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    limit = choros.callbacks.BeforeTimeLimit(tmp_path)
    limit.set_model(model)
    with pytest.raises(InvalidInputError, match=r"begin it with keras\.Input"):
        limit.on_train_begin()  # fit itself builds a model first, where it can
    model.build((None, 2))
    monkeypatch.setenv("CHOROS_STOP_AT", "noon")
    with pytest.raises(InvalidInputError, match="CHOROS_STOP_AT=noon"):
        limit.on_train_begin()
