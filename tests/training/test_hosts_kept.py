"""Ranks of several hosts that train alone: the center that is divided among them is kept, and they go on from it."""

import json
import os
import secrets
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, signal, sys, time
import keras, numpy as np
import choros
from choros.comm import hierarchical_group
from choros.training.worker import comm_setup

room, hosts = sys.argv[1], int(sys.argv[2])
rank, size, here = int(os.environ["CHOROS_RANK"]), int(os.environ["CHOROS_SIZE"]), hierarchical_group.machine()
hierarchical_group.machine = lambda: f"{here} {rank * hosts // size}"  # the ranks are as on so many hosts
comm_setup._MIN_DIVIDED_BYTES = 64  # bytes of a center that is divided

def loss(truth, prediction):  # whose gradient is 1: each weight counts the steps
    return keras.ops.mean(prediction, axis=-1) + 0 * keras.ops.mean(truth, axis=-1)

class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        kill, hold = f"{room}/kill-{rank}", f"{room}/hold"
        while index > 20 and os.path.exists(f"{room}/later") and os.path.exists(hold):
            time.sleep(0.01)
        if index > 20 and os.path.exists(f"{room}/later") and os.path.exists(kill):
            os.unlink(kill)
            os.kill(os.getpid(), signal.SIGKILL)
        return np.ones((size, 500), "float32"), np.ones((size, 1), "float32")

class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        open(f"{room}/later", "w").close()
        print("epoch", epoch, flush=True)

model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(1 / 64), loss)
trainer = choros.Trainer(model, choros.DOWNPOUR(window=3))
kept = choros.Checkpoint(f"{room}/state", every=5)
open(f"{room}/pid-{rank}", "w").write(str(os.getpid()))
history = trainer.fit(Rows(), epochs=4, seed=3, verbose=0, callbacks=[Say()], checkpoint=kept, resume=True)
weights = model.get_weights()[0].reshape(-1) * -64
with open(f"{room}/end-{rank}", "w") as file:
    json.dump([weights.tolist(), history.run.group, history.run.rows, history.epoch], file)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    meeting = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), "CHOROS_COORDINATOR": "127.0.0.1"}
    jobs = []

    def run(hosts, restarts=0, size=3):
        command = ["-n", str(size), "--restarts", str(restarts), "--threads", "1", "script.py", str(tmp_path)]
        job = subprocess.Popen(
            [sys.executable, "-m", "choros", "run", *command, str(hosts)],
            cwd=tmp_path,
            env={**os.environ, **meeting},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(job)
        return job

    yield run
    for job in jobs:
        if job.poll() is None:
            job.terminate()
        job.communicate(timeout=60)


def ended(job, folder, code=0, size=3):
    """Return the results of a job's ranks, which are equal, after the job has ended with this code."""
    out, errors = job.communicate(timeout=200)
    assert job.returncode == code, out + errors
    if code:
        return errors
    results = [json.loads((folder / f"end-{rank}").read_text()) for rank in range(size)]
    assert all(each[0] == results[0][0] for each in results)
    return [*results[0], errors]


def test_after_a_rank_died_each_step_is_in_each_part_of_the_center_once(start, tmp_path):
    (tmp_path / "kill-2").touch()
    weights, group, rows, epochs, errors = ended(start(2, restarts=1), tmp_path)
    assert not (tmp_path / "kill-2").exists()
    assert group == "a center divided among 2 hosts"
    assert weights == [3 * 4 * 40] * 500  # each rank makes a step on its share of each batch
    assert rows < 3 * 4 * 40  # of those before the state none was trained again
    assert epochs[-1] == 3
    assert "started again" in errors


def test_a_warning_on_another_host_ends_all_in_a_state_with_which_one_host_goes_on(start, tmp_path):
    hold = tmp_path / "hold"  # all wait in the second epoch until the warning is given
    hold.touch()
    job = start(2)
    assert "epoch 0" in job.stdout.readline()
    os.kill(int((tmp_path / "pid-2").read_text()), signal.SIGTERM)
    hold.unlink()
    errors = ended(job, tmp_path, code=75)
    assert "stop requested: epoch " in errors
    weights, group, rows, epochs, _ = ended(start(1), tmp_path)
    assert group == "a center in shared memory"
    assert weights == [3 * 4 * 40] * 500  # each rank makes a step on its share of each batch
    assert rows < 3 * 3 * 40
    assert epochs[-1] == 3
