"""The server of a host's part of the center is killed in the middle of a run: another one goes on, all counts once."""

import contextlib
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SIZE, EPOCHS, BATCHES, RATE = 140_000, 2, 60, 1 / 64  # 560 kB: two of them are divided among the hosts
SCRIPT = """
import json, os, sys, time
from pathlib import Path

import keras
import numpy as np

import choros
from choros.training.worker.exchange import AsyncExchange
from choros.comm import hierarchical_group

name, layers, size, epochs, batches, rate, timeout = json.loads(sys.argv[1])
rank, here, meet = int(os.environ["CHOROS_RANK"]), hierarchical_group.machine(), AsyncExchange.run
hierarchical_group.machine = lambda: f"{here} {rank}"  # each rank is as on a host of its own
gave = np.zeros(size * layers)


def counted(self, local, window, others):
    before = local - self.seen if name == "downpour" else local.copy()
    found = meet(self, local, window, others)
    gave[:] += before if name == "downpour" else before - local
    print("exchanged", rank, self.exchanges, flush=True)
    return found


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return batches

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.ones((2, size), "float32"), np.ones((2, 1), "float32")


AsyncExchange.run = counted
keras.utils.set_random_seed(0)
inputs = keras.Input((size,))
parts = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs) for _ in range(layers)]
model = keras.Model(inputs, keras.layers.Add()(parts) if layers > 1 else parts[0])
model.compile(keras.optimizers.SGD(rate), lambda y, out: keras.ops.mean(out, axis=-1) + 0 * keras.ops.mean(y, axis=-1))
rule = choros.DOWNPOUR(window=3) if name == "downpour" else choros.AEASGD(window=3)
trainer = choros.Trainer(model, rule, timeout=timeout)
done = trainer.fit(Batches(), epochs=epochs, verbose=0, seed=1)
weights = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
np.savez(f"{rank}.npz", weights=weights, gave=gave, losses=len(done.history["loss"]), rows=done.run.rows)
print("group", done.run.group, flush=True)
"""


def processes(mark, message=b""):
    """The processes of a job that live and have these words in their command line, by their numbers."""
    results = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if message in (entry / "cmdline").read_bytes() and mark in (entry / "environ").read_bytes():
                results.append(int(entry.name))
    return results


class Job:
    """Ranks of ``choros run`` that meet by sockets; their lines as they come."""

    def __init__(self, room, name, ranks, layers=1, timeout=60.0):
        (room / "script.py").write_text(SCRIPT)
        self.room, self.mark, self.lines, self.seen = room, secrets.token_hex(8).encode(), [], set()
        settings = json.dumps([name, layers, SIZE, EPOCHS, BATCHES, RATE, timeout])
        meeting = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), "CHOROS_COORDINATOR": "127.0.0.1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "choros", "run", "-n", str(ranks), "--threads", "1", "script.py", settings],
            cwd=room,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **meeting, "MARK": self.mark.decode(), "CHOROS_NETWORK": "lo"},
        )

    def until(self, message):
        """Read on until there is a line with these words."""
        for line in self.process.stdout:
            self.lines.append(line)
            if message in line:
                return
        raise AssertionError("".join(self.lines))

    def kill_a_server(self):
        """Kill one that has not been killed; wait for it to be there."""
        limit = time.monotonic() + 120.0
        while not (fresh := set(processes(self.mark, b"choros.training.async_control.shard_server")) - self.seen):
            assert time.monotonic() < limit, "".join(self.lines)
            time.sleep(0.01)
        self.seen.add(first := min(fresh))
        os.kill(first, signal.SIGKILL)

    def end(self):
        """Read to the end; return the exit code."""
        self.lines += self.process.stdout
        code = self.process.wait(60)
        limit = time.monotonic() + 20.0
        while remaining := processes(self.mark):
            assert time.monotonic() < limit, remaining
            time.sleep(0.05)
        return code


@pytest.fixture
def job(tmp_path):
    made = []

    def start(*values, **how):
        made.append(Job(tmp_path, *values, **how))
        return made[-1]

    yield start
    for item in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(item.process.pid, signal.SIGKILL)
        item.process.stdout.close()
        item.process.wait(20)


@pytest.mark.parametrize(("name", "layers", "ranks"), [("downpour", 2, 2), ("aeasgd", 1, 3)])
def test_a_server_that_is_killed_is_started_again_and_every_step_is_in_the_center_once(job, name, layers, ranks):
    rng, run = random.Random(5), job(name, ranks, layers)
    for turn, least in enumerate((1, 4, 8)):
        run.until(f"exchanged {ranks - 1} {least + rng.randrange(3)}")
        time.sleep(rng.uniform(0.0, 0.02))
        run.kill_a_server()
        if layers == 1 or turn == 0:
            run.until("continues with the same center, restart")
    code, text = run.end(), "".join(run.lines)
    assert code == 0, text
    assert text.count("was ended by SIGKILL") == 3, text
    assert f"a center divided among {ranks} hosts" in text or layers == 1
    results = [np.load(run.room / f"{rank}.npz") for rank in range(ranks)]
    gave = sum(each["gave"] for each in results)
    for each in results:
        np.testing.assert_array_equal(each["weights"], results[0]["weights"])
        np.testing.assert_allclose(each["weights"], gave, rtol=0, atol=1e-4)  # what is twice or not there: 0.01 or more
        assert each["losses"] == EPOCHS
    if name == "downpour":
        assert set(results[0]["weights"]) == {-RATE * EPOCHS * BATCHES * ranks}


def test_a_server_that_dies_again_and_again_ends_the_job_with_an_error(job):
    run = job("aeasgd", 2)
    run.until("exchanged 1 1")
    for _ in range(4):
        run.kill_a_server()
    code, text = run.end(), "".join(run.lines)
    assert code != 0, text
    assert text.count("continues with the same center, restart") == 3, text
    assert "another one was started 3 times, so the job ends" in text
    assert "has gone, and so has the rank that would start another one" in text, text
