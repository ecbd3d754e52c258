"""Hosts of unequal devices: what their workers train together is what plain Keras trains on all rows."""

import json
import os
import secrets
import subprocess
import sys

import keras
import numpy as np
import pytest

import choros

JOB = """
import json, os, pathlib, sys
import keras
import numpy as np
import choros
from choros import parallel
from choros.comm import hierarchical_group

rank, here = int(os.environ["CHOROS_RANK"]), hierarchical_group.machine()
hierarchical_group.machine = lambda: f"{here} {rank // 2}"  # ranks 0 and 1 are as on one host, rank 2 on another
each = json.loads(sys.argv[1])
if each[rank] > 1:
    parallel.logical_devices(each[rank])
arrays = np.load("data.npz")
model = keras.models.load_model("model.keras")
how = json.loads(sys.argv[2])
checked = arrays["x"][:17], arrays["y"][:17]
weight = arrays["weight"]
trainer = choros.Trainer(model, devices_per_worker=each)
history = trainer.fit(arrays["x"], arrays["y"], sample_weight=weight, validation_data=checked, seed=1, **how)
np.savez(f"rank{rank}.npz", *model.get_weights())
if rank == 0:
    pathlib.Path("history.json").write_text(json.dumps([history.history, history.run.group]))
"""
HOW = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}


@pytest.fixture
def make():
    def make():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((8,)), dense(6, "tanh"), dense(4, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return make


@pytest.fixture
def rows(data):
    """61 rows, of which the last batch has one, their labels, and weights of rows."""
    return *data(61), np.random.default_rng(7).uniform(0.2, 3, 61).astype("float32")


@pytest.fixture
def expected(make, rows):
    """The model and the history of plain Keras on one device."""
    (x, y, weight), model = rows, make()
    return model, model.fit(x, y, sample_weight=weight, validation_data=(x[:17], y[:17]), **HOW)


def test_ranks_of_two_hosts_with_unequal_devices(make, rows, expected, tmp_path, same):
    """The first host has ranks of two devices and of one, the other has a rank of three."""
    x, y, weight = rows
    make().save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y, weight=weight)
    (tmp_path / "job.py").write_text(JOB)
    meeting = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), "CHOROS_COORDINATOR": "127.0.0.1"}
    command = ["-n", "3", "--threads", "1", "job.py", json.dumps([2, 1, 3]), json.dumps(HOW)]
    done = subprocess.run(
        [sys.executable, "-m", "choros", "run", *command],
        cwd=tmp_path,
        env={**os.environ, **meeting},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain, history = expected
    trained = [list(np.load(tmp_path / f"rank{rank}.npz").values()) for rank in range(3)]
    for weights in trained:
        same(plain, weights, 1e-6)
        assert all(map(np.array_equal, weights, trained[0]))
    logs, group = json.loads((tmp_path / "history.json").read_text())
    assert "over 2 hosts" in group
    assert logs.keys() == history.history.keys()
    for name, values in history.history.items():
        np.testing.assert_allclose(logs[name], values, atol=2e-6, err_msg=name)


def test_workers_of_a_launcher_with_unequal_devices(make, rows, expected, tmp_path, monkeypatch, same, same_history):
    monkeypatch.chdir(tmp_path)
    (x, y, weight), model = rows, make()
    trainer = choros.Trainer(
        model, workers=2, launcher=choros.Ssh("localhost:2"), devices_per_worker=[2, 1], first_timeout=120
    )
    history = trainer.fit(x, y, sample_weight=weight, validation_data=(x[:17], y[:17]), seed=1, **HOW)
    plain, plain_history = expected
    same_history(history, plain_history, 2e-6)
    same(model, plain, 1e-6)
