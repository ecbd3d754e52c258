"""A rank is killed within an epoch: the others go on from the last commit, as if they had always been so few."""

import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

# What happens hardly depends on the backend.
pytestmark = [] if os.environ["KERAS_BACKEND"] == "jax" else [pytest.mark.long]

SCRIPT = """
import json, os, signal
import keras
import numpy as np
import choros.hvd as hvd
from data import model, rows

hvd.init()
net, victim, places = model(), hvd.rank() == 1, []
net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)), "mse")
state = hvd.elastic.KerasState(net, epoch=0, batch=0)

class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if victim and (state.epoch, state.batch) == (1, 3):  # one batch after the last commit
            os.kill(os.getpid(), signal.SIGKILL)

def reset():
    net.optimizer.learning_rate = 0.01 * hvd.size()
    places.append([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), state.epoch, state.batch])
state.register_reset_callbacks([reset])

@hvd.elastic.run
def train(state):
    elastic = hvd.elastic
    while state.epoch < 3:
        x, y = rows(state.epoch, state.batch, hvd.rank(), hvd.size())
        callbacks = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state),
                     elastic.CommitStateCallback(state, 2), Die()]
        net.fit(x, y, batch_size=24 // hvd.size(), shuffle=False, verbose=0, callbacks=callbacks)

train(state)
env = [os.environ[name] for name in ("CHOROS_RANK", "CHOROS_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE")]
print("said", json.dumps([places, env, [w.tolist() for w in net.get_weights()]]), flush=True)
"""
DATA = """
import keras
import numpy as np

def model():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)

def rows(epoch, batch, rank=0, size=1):
    x = np.random.default_rng(0).standard_normal((240, 4)).astype("float32")
    order = np.random.default_rng(epoch).permutation(240).reshape(-1, 24)[batch:]
    mine = order[:, rank * 24 // size : (rank + 1) * 24 // size].reshape(-1)
    return x[mine], x[mine].sum(1, keepdims=True)
"""


def test_a_rank_is_killed_and_the_others_go_on_from_the_last_commit(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "script.py").write_text(SCRIPT)
    job = subprocess.run(
        [sys.executable, "-m", "choros", "run", "-n", "3", "--min-np", "2", "--threads", "1", "script.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    message = (
        r"choros run: rank 1 \(process 1, pid \d+, host localhost\) was ended by SIGKILL .*; "
        r"ranks of its generation that continue: 2"
    )
    assert re.search(message, job.stderr), job.stderr
    assert "generation 2, size 2 (rank 0: process 0, rank 1: process 2)" in job.stderr
    matches = {mark: json.loads(text) for mark, text in re.findall(r"^\[(\d)\] said (.*)$", job.stdout, re.M)}
    assert sorted(matches) == ["0", "2"]
    for rank, (places, env, weights) in enumerate([matches["0"], matches["2"]]):
        assert places == [[rank, 2, rank, 2, 1, 2]]
        assert env == [str(rank), "2", str(rank), "2"]
        assert weights == matches["0"][2]
    for value, wanted in zip(matches["0"][2], without_failure(), strict=True):
        np.testing.assert_allclose(np.array(value), wanted, rtol=1e-5, atol=1e-6)


def without_failure():
    """Train in one process with the same batches and rates: three ranks' up to the commit, then two ranks'."""
    here = {}
    exec(DATA, here)
    net = here["model"]()
    net.compile(keras.optimizers.SGD(0.03, momentum=0.9), "mse")
    for epoch in range(3):
        x, y = here["rows"](epoch, 0)
        for batch in range(10):
            if (epoch, batch) == (1, 2):
                net.optimizer.learning_rate = 0.02
            net.train_on_batch(x[24 * batch : 24 * batch + 24], y[24 * batch : 24 * batch + 24])
    return net.get_weights()
