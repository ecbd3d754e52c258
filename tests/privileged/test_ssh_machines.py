"""``choros run -H``: ranks on two machines, which are namespaces of this one; a script stands in for ssh."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import choros
import choros.hvd as hvd

hvd.init()
rank, how = hvd.rank(), sys.argv[1]
place = [os.uname().nodename, hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
total = float(hvd.allreduce(np.ones(5000) * rank, op=hvd.Sum)[0])
print("said " + json.dumps([rank, place, total, os.environ["TOLD"], os.getcwd()]), flush=True)
if how == "train":
    import keras

    for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
        history = choros.Trainer(model, algorithm).fit(x, x[:, 0], batch_size=12, epochs=2, verbose=0).history
        weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
        assert weights == weights[:1] * 3
        assert history["loss"][1] < history["loss"][0]
elif how == "leave":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("ready", flush=True)
    time.sleep(60)
elif how != "go":
    if rank == 2:
        exec(how)
    hvd.allreduce(np.ones(3))
    time.sleep(30)
"""


@pytest.fixture
def run(ssh, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(how, *more, hosts="one:2,two:2", **popen):
        command = [sys.executable, "-m", "choros", "run", "-n", "3", "-H", hosts, "--ssh", str(ssh), *more]
        return subprocess.Popen(
            [*command, str(script), how],
            cwd=tmp_path,
            env={**os.environ, "TOLD": "a b'c"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **popen,
        )

    yield start
    time.sleep(0.2)
    remaining = subprocess.run(["pgrep", "-fa", str(tmp_path)], capture_output=True, text=True).stdout
    assert not remaining


def test_ranks_know_their_places_meet_and_train(run, tmp_path):
    job = run("train")
    out = job.communicate(timeout=90)[0]
    assert job.returncode == 0, out
    matches = sorted(json.loads(text) for text in re.findall(r"^\[\d\] said (.*)$", out, re.M))
    assert [result[0] for result in matches] == [0, 1, 2]
    assert [result[1] for result in matches] == [["one", 3, 0, 2, 0, 2], ["one", 3, 1, 2, 0, 2], ["two", 3, 0, 1, 1, 2]]
    for _, _, total, message, folder in matches:
        assert (total, message, folder) == (3.0, "a b'c", str(tmp_path))


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("sys.exit(7)", 7, "rank 2 of 3 .*host two.* exited with code 7"),
        ("raise ValueError('the cause')", 1, r"\[2\] ValueError: the cause"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 of 3 .*host two.* was ended by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_with_its_own_code(run, how, code, message):
    begun = time.monotonic()
    job = run(how)
    out = job.communicate(timeout=30)[0]
    assert job.returncode == code, out
    assert re.search(message, out), out
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_head_is_told_to_end_or_dies_all_ranks_end(run, number, tmp_path):
    job = run("time.sleep(60)", "--grace", "1")
    for line in job.stdout:
        if "said" in line and "[2]" in line:
            break
    job.send_signal(number)
    job.communicate(timeout=20)
    assert job.returncode == (143 if number == signal.SIGTERM else -9)
    limit = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_a_warning_to_the_head_reaches_all_ranks(run):
    job = run("leave")
    ready = 0
    for line in job.stdout:
        ready += "ready" in line
        if ready == 3:
            break
    job.send_signal(signal.SIGUSR1)
    out = job.communicate(timeout=30)[0]
    assert job.returncode == 75, out


def test_a_host_that_cannot_be_reached_is_named(run, ssh):
    ssh.write_text('#!/bin/sh\necho "ssh: connect to host two: No route to host" >&2\nexit 255\n')
    job = run("go")
    out = job.communicate(timeout=30)[0]
    assert job.returncode == 1, out
    assert "No route to host" in out
    assert "could not be reached by ssh" in out


HERE = """
import json, os, sys
import numpy as np
import keras
import choros

def model():
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made

class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("seen", epoch, os.uname().nodename, float(self.model.get_weights()[0][0, 0]), flush=True)

x = np.random.default_rng(0).standard_normal((61, 4)).astype("float32")
hosts, how = choros.Ssh("one:2,two:1", sys.argv[1]), {"batch_size": 12, "epochs": 2, "seed": 5, "verbose": 0}
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
    there, here = model(), model()
    fit = choros.Trainer(there, algorithm, launcher=hosts).fit(x, x[:, 0], callbacks=[Seen()], **how)
    choros.Trainer(here, algorithm, workers=3).fit(x, x[:, 0], **how)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(there.get_weights(), here.get_weights()))
    print("said", json.dumps([apart, fit.history["loss"], len(fit.run.workers)]), flush=True)

class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        if os.environ.get("CHOROS_RANK") == "2" and index == 20:
            os.kill(os.getpid(), 9)
        return x[:12], x[:12, 0]

try:
    choros.Trainer(model(), launcher=hosts).fit(Rows(), verbose=0, epochs=3)
except choros.WorkerFailedError as error:
    print("failed", error.rank, error.host, error.signal)
"""


def test_a_trainer_here_has_its_workers_there(ssh, tmp_path):
    (tmp_path / "here.py").write_text(HERE)
    command = [sys.executable, "here.py", str(ssh)]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert out.returncode == 0, out.stderr
    seen = re.findall(r"^seen (\d) (\S+) ", out.stdout, re.M)
    assert seen == [("0", os.uname().nodename), ("1", os.uname().nodename)] * 2
    (apart, _, count), (_, losses, _) = (json.loads(t) for t in re.findall(r"^said (.*)$", out.stdout, re.M))
    assert apart <= 1e-6
    assert count == 3
    assert losses[1] < losses[0]
    assert "failed 2 two SIGKILL" in out.stdout
