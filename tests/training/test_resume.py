"""Whole runs that are killed, warned, interrupted or out of disk, and that go on: real processes, real signals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

import choros
from choros.errors import CheckpointError, InvalidInputError
from choros.training.async_control.control_block import ControlBlock
from choros.training.checkpoint import CheckpointStore

MODEL = """
import os, sys
import keras, numpy as np
import choros

rng = np.random.default_rng(0)
x, y = rng.normal(size=(74, 8)).astype("float32"), rng.integers(0, 3, 74)
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, "softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
how = {"batch_size": 10, "epochs": 4, "seed": 3, "verbose": 0}
synchronous, asynchronous = choros.EASGD(window=3), choros.AEASGD(window=3)

def digest():
    return [float(np.abs(w).astype("float64").sum()) for w in model.get_weights()]
"""
SCRIPT = """
import json, time
from choros.training.checkpoint import Checkpoint

where, name, resume = sys.argv[1], sys.argv[2], sys.argv[3] == "resume"
slow = float(os.environ.get("SLOW", 0))

class Slowly(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        print("batch", self.epoch, batch, flush=True)
        time.sleep(slow)

inside = "CHOROS_RANK" in os.environ
trainer = choros.Trainer(model, globals()[name], **({} if inside else {"workers": 2}))
kept = Checkpoint(where, every=3, keep=2)
history = trainer.fit(x, y, **how, resume=resume, callbacks=[Slowly()], checkpoint=kept)
print("done", json.dumps([digest(), history.history, history.epoch]), flush=True)
"""


class Run:
    """The script in a process group of its own; its lines are read as they come."""

    def __init__(self, room, name, resume="begin", ranks=0, more=(), slow=0.0):
        (room / "script.py").write_text(MODEL + SCRIPT)
        before = ["-m", "choros", "run", "-n", str(ranks), *more] if ranks else []
        self.process = subprocess.Popen(
            [sys.executable, *before, str(room / "script.py"), str(room / "state"), name, resume],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "SLOW": str(slow), "JAX_PLATFORMS": "cpu"},
        )
        self.workers = []

    def until(self, text):
        for line in self.process.stdout:
            if text in line:
                return self
        raise AssertionError(f"{text!r} was not said:\n{self.process.stderr.read()}")

    def family(self):
        """All processes that it has started, itself included."""
        results, rest = [], [self.process.pid]
        while rest:
            pid = rest.pop()
            results.append(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    rest += map(int, children.read().split())
        return results

    def rank(self, rank):
        """The process of a rank of a job."""
        for pid in self.family():
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"CHOROS_RANK={rank}\0".encode() in file.read():
                    return pid
        raise AssertionError(f"no process of rank {rank}")

    def ends(self, code):
        self.out, self.errors = self.process.communicate(timeout=120)
        assert self.process.returncode == code, self.errors
        lines = [line.partition("done ")[2] for line in self.out.splitlines() if "done " in line]
        return [json.loads(line) for line in lines]


COUNTED = """
from choros.training.executors.in_job import InJobCallbackChannel
from choros.comm import hierarchical_group
from choros.comm.tcp.connections import TcpMessages

here = hierarchical_group.machine()
hierarchical_group.machine = lambda: here + os.environ["CHOROS_RANK"]  # each rank is as on a host of its own
received, states, receive, keep = [0], [], TcpMessages.receive, InJobCallbackChannel.save_state

def counting(self, array, rank, tag):
    received[0] += array.nbytes
    return receive(self, array, rank, tag)

def keeping(self, part, asked):
    before = received[0]
    keep(self, part, asked)
    states.append((sum(array.nbytes for group in part[1].values() for array in group), received[0] - before))

TcpMessages.receive, InJobCallbackChannel.save_state = counting, keeping
wide = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4000, "relu"), keras.layers.Dense(3, "softmax")])
wide.compile("adam", "sparse_categorical_crossentropy")
choros.Trainer(wide, synchronous).fit(x, y, **how | {"epochs": 1}, checkpoint=sys.argv[1])
print("done", json.dumps([int(os.environ["CHOROS_RANK"]), *states[-1]]), flush=True)
"""


def test_the_state_of_each_rank_of_a_job_goes_to_rank_0_and_to_no_other(tmp_path):
    (tmp_path / "script.py").write_text(MODEL + "import json\n" + COUNTED)
    done = subprocess.run(
        [sys.executable, "-m", "choros", "run", "-n", "2", tmp_path / "script.py", tmp_path / "state"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CHOROS_COMM": "tcp", "CHOROS_SECRET": "ab" * 32, "CHOROS_COORDINATOR": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.partition("done ")[2]) for line in done.stdout.splitlines() if "done " in line]
    states = {rank: (size, received) for rank, size, received in lines}
    assert states[1][0] > 100_000
    assert states[1][0] <= states[0][1] < 1.2 * states[1][0]
    assert states[1][1] < 50_000  # frames, which say who is there


def gone(pids, within=10.0):
    """Return whether all these processes end soon."""
    limit = time.monotonic() + within
    while any(map(alive, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def undisturbed(pool):
    """The weights and the figures of a run that nothing happened to."""
    made = {}
    exec(MODEL, made)
    fit = choros.Trainer(made["model"], made["synchronous"], workers=2, pool=pool).fit
    return made["digest"], fit(made["x"], made["y"], **made["how"]).history


def test_a_run_that_is_killed_and_then_loses_a_rank_goes_on_to_the_same_bits(pools, tmp_path):
    rng, states = np.random.default_rng(5), CheckpointStore(tmp_path / "state")
    run = Run(tmp_path, "synchronous", slow=0.05).until(f"batch 1 {rng.integers(8)}")
    family = run.family()
    assert len(family) >= 3  # the caller and two workers
    for pid in family:
        with contextlib.suppress(ProcessLookupError):  # workers end with the caller
            os.kill(pid, signal.SIGKILL)
    run.process.communicate()
    assert gone(family)
    saved = states.latest().facts
    assert (saved["epoch"], saved["batch"]) >= (0, 6)

    run = Run(tmp_path, "synchronous", "resume", ranks=2, more=["--restarts", "1"], slow=0.1).until("batch 2 1")
    os.kill(run.rank(1), signal.SIGKILL)
    result = run.ends(0)
    assert "the job ended with code 137: started again (0 restarts left)" in run.errors
    digest, history = undisturbed(pools(2))
    weights, figures, epochs = result[0]
    assert weights == result[1][0] == digest()
    assert epochs == list(range(epochs[0], 4))
    assert epochs[0] >= saved["epoch"]
    assert figures == {name: values[epochs[0] :] for name, values in history.items()}


def test_ranks_that_wait_for_nobody_are_warned_and_go_on(tmp_path):
    run = Run(tmp_path, "asynchronous", ranks=2, slow=0.2).until("batch 1 2")
    os.kill(run.rank(1), signal.SIGUSR1)  # any rank may be told
    assert run.ends(75) == []
    saved = re.search(
        r"choros: stop requested: epoch (\d), each worker after its last exchange, is saved in", run.errors
    )
    assert saved, run.errors
    next_epoch = int(saved[1]) - 1
    assert next_epoch in (1, 2, 3)  # the signal may arrive epochs later on a busy machine
    assert "Traceback" not in run.errors
    resumed = Run(tmp_path, "asynchronous", "resume", ranks=2).ends(0)
    assert [epochs for _, _, epochs in resumed] == [list(range(next_epoch, 4))] * 2
    assert CheckpointStore(tmp_path / "state").latest().facts["epoch"] == 4


@pytest.mark.parametrize(("name", "number"), [("easgd", signal.SIGTERM), ("aeasgd", signal.SIGUSR1)])
def test_a_warning_ends_a_fit_in_a_checkpoint(name, number, pools, data, make_model, same, tmp_path, capfd):
    """It goes to all processes, as a scheduler's does; workers leave it to the caller."""
    import keras

    class Warned(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)
            if (self.epoch, batch) == (1, 1):
                for pid in (*pools(2).start().pids, os.getpid()):
                    os.kill(pid, number)

    x, y = data()

    class Slowly(keras.utils.PyDataset):  # workers that wait for nobody would be done before they are warned
        def __len__(self):
            return 6

        def __getitem__(self, index):
            time.sleep(0.04)
            return x[index * 6 : index * 6 + 6], y[index * 6 : index * 6 + 6]

    def fit(**how):
        model = make_model(dropout=0.3)
        trainer = choros.Trainer(model, name, workers=2, pool=pools(2))
        return model, trainer.fit(Slowly(), epochs=8, seed=4, verbose=0, **how)

    uninterrupted, _ = fit()
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        fit(checkpoint=tmp_path, callbacks=[Warned()])
    assert ended.value.code == 75
    assert signal.getsignal(number) is handler
    assert "choros: stop requested: epoch" in capfd.readouterr().err
    first = CheckpointStore(tmp_path).latest().facts["epoch"]
    assert 1 <= first < 8
    model, history = fit(checkpoint=tmp_path, resume=True)
    assert history.epoch == list(range(first, 8))
    if name == "easgd":
        same(model, uninterrupted, tolerance=0)


def small(pools, data, make_model, *, model=None, seeded=0, **how):
    x, y = data(seed=seeded)
    return choros.Trainer(model or make_model(), workers=2, pool=pools(2)).fit(
        x, y, **{"batch_size": 10, "epochs": 2, "verbose": 0, **how}
    )


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_good_one(pools, data, make_model, tmp_path, monkeypatch):
    small(pools, data, make_model, checkpoint=tmp_path)
    fsync = os.fsync

    def full(descriptor):
        if os.fstat(descriptor).st_size > 4096:  # the block that is written before training fits
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device.*last good one"):
        small(pools, data, make_model, checkpoint=tmp_path, epochs=3, resume=True, seed=None)
    monkeypatch.undo()
    assert CheckpointStore(tmp_path).latest().facts["epoch"] == 2
    assert small(pools, data, make_model, checkpoint=tmp_path, epochs=3, resume=True).epoch == [2]


def test_asynchronous_workers_meet_once_more_after_the_last_validation(pools, data, make_model, tmp_path):
    x, y = data()
    trainer = choros.Trainer(make_model(), choros.AEASGD(window=64), workers=2, pool=pools(2))
    how = {"checkpoint": tmp_path, "validation_data": (x, y)}
    history = trainer.fit(x, y, batch_size=10, epochs=2, verbose=0, **how)
    assert [worker.exchanges for worker in history.run.workers] == [1, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"resume": True}, "resume=True needs a checkpoint"),
        ({"checkpoint": 5}, "checkpoint=5"),
        ({"batch_size": 12, "resume": True}, "batch_size=10; this one has 12"),
        ({"shuffle": False, "resume": True}, "shuffle=True; this one has False"),
        ({"seed": 9, "resume": True}, "seed=8; this one has 9"),
        ({}, "a checkpoint of an earlier training, checkpoint-00000001.choros. Give resume=True"),
    ],
)
def test_what_does_not_fit_is_refused(how, message, pools, data, make_model, tmp_path):
    if len(how) != 1:
        small(pools, data, make_model, checkpoint=tmp_path, epochs=1, seed=8)
        how = {"checkpoint": tmp_path, **how}
    with pytest.raises(InvalidInputError, match=message):
        small(pools, data, make_model, **how)


def test_another_model_or_other_data_are_refused(pools, data, make_model, tmp_path, capfd):
    import keras

    def other(units=6, activation="relu"):
        hidden = keras.layers.Dense(units, activation)
        model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def other_loss():
        model = make_model()
        loss = lambda y, out: keras.losses.sparse_categorical_crossentropy(y, out)
        model.compile(model.optimizer, loss, metrics=["accuracy"])
        return model

    small(pools, data, make_model, checkpoint=tmp_path, epochs=1, seed=8)
    for message, how in {
        r"optimizer\[0\]='Adam'; this one has 'AdamW'": {"model": make_model(keras.optimizers.AdamW(1e-2))},
        r"optimizer\[1\]\['beta_1'\]=0.9; this one has 0.8": {"model": make_model(keras.optimizers.Adam(beta_1=0.8))},
        "loss='sparse_categorical_crossentropy'; this one has 'lambda ": {"model": other_loss()},
        "numbers that its metrics keep=5; this one has 3": {"model": make_model(metrics=())},
        r"of another model: layer 1 \(Dense\): units 6 and 7": {"model": other(7)},
        r"of another model: layer 1 \(Dense\): activation 'relu' and 'tanh'": {"model": other(activation="tanh")},
        "of other data: the first rows or their weights differ": {"seeded": 1},
        "of other data: the first rows or their weights differ ": {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}},
    }.items():
        with pytest.raises(InvalidInputError, match=message.rstrip()):
            small(pools, data, make_model, checkpoint=tmp_path, epochs=2, resume=True, seed=8, **how)
    capfd.readouterr()
    small(pools, data, make_model, checkpoint=tmp_path, epochs=2, resume=True, seed=8)
    assert "choros: checkpoint " in (stderr := capfd.readouterr().err)
    assert "checkpoint-00000001.choros: training resumes in epoch 2, after 0 of its batches" in stderr


def test_epochs_that_ended_before_the_checkpoint_are_reported_after_a_resume(pools, data, make_model, tmp_path):
    """Callbacks may be late: the workers were in a later epoch when the state was saved."""
    (x, y), ended = data(), []

    def late(epoch, logs):
        time.sleep(2.0 * (epoch == 0))
        while epoch and not CheckpointStore(tmp_path).paths():  # a later state may replace one that is not written yet
            time.sleep(0.01)

    slow = keras.callbacks.LambdaCallback(on_epoch_end=late)
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch))
    how = {"batch_size": 10, "epochs": 3, "verbose": 0, "checkpoint": choros.Checkpoint(tmp_path, keep=9)}
    choros.Trainer(make_model(), choros.DOWNPOUR(window=2), workers=2, pool=pools(2)).fit(x, y, callbacks=[slow], **how)
    for path in CheckpointStore(tmp_path).paths()[1:]:
        path.unlink()
    assert CheckpointStore(tmp_path).latest().facts["epoch"] == 1  # saved after the callbacks of the first epoch
    trainer = choros.Trainer(make_model(), choros.DOWNPOUR(window=2), workers=2, pool=pools(2))
    history = trainer.fit(x, y, callbacks=[seen], resume=True, **how)
    assert history.epoch == ended == [1, 2]


def test_a_checkpoint_of_another_algorithm_is_refused_by_its_name(pools, data, make_model, tmp_path):
    small(pools, data, make_model, checkpoint=tmp_path, epochs=1)
    trainer = choros.Trainer(make_model(), "aeasgd", workers=2, pool=pools(2))
    with pytest.raises(InvalidInputError, match="a training by AllReduce; this one uses AEASGD"):
        trainer.fit(*data(), batch_size=10, verbose=0, checkpoint=tmp_path, resume=True)


def test_a_resume_from_damaged_checkpoints_only_does_not_begin_again(pools, data, make_model, tmp_path):
    small(pools, data, make_model, checkpoint=tmp_path, epochs=2)
    for path in CheckpointStore(tmp_path).paths():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"has no usable checkpoint \(2 damaged\)"):
        small(pools, data, make_model, checkpoint=tmp_path, epochs=3, resume=True)


def test_a_directory_that_cannot_be_written_to_is_found_before_training(pools, data, make_model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="nothing was trained. Give another directory"):
        small(pools, data, make_model, checkpoint=tmp_path / "file")


def test_restarts_that_cannot_be_are_refused(make_model):
    for restarts in (-1, 1.5, True):
        with pytest.raises(InvalidInputError, match="restarts="):
            choros.Trainer(make_model(), workers=2, restarts=restarts)


def test_a_failure_after_a_resume_leaves_the_model_as_it_was(tmp_path, fails):
    def made():
        model = keras.Sequential([keras.Input((3,)), fails(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    how = {"batch_size": 8, "verbose": 0, "checkpoint": str(tmp_path / "kept")}
    choros.Trainer(made(), "aeasgd", workers=2).fit(x, x[:, :1], epochs=1, **how)
    model = made()
    model.optimizer.build(model.trainable_variables)
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in model.optimizer.variables]
    fails.flag.touch()
    with pytest.raises(choros.WorkerFailedError, match="as the test wants it"):
        choros.Trainer(model, "aeasgd", workers=2).fit(x, x[:, :1], epochs=2, resume=True, **how)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_training_that_a_callback_ended_early_is_not_resumed(algorithm, make_model, data, pools, tmp_path):
    x, y = data(64)
    model = make_model()
    trainer = choros.Trainer(model, algorithm, pool=pools(2))
    stops = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1))
    history = trainer.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=[stops], checkpoint=tmp_path)
    assert history.epoch == [0, 1]
    before = model.get_weights()
    history = trainer.fit(x, y, batch_size=16, epochs=6, verbose=0, checkpoint=tmp_path, resume=True)
    assert history.epoch == []
    assert [worker.steps for worker in history.run.workers] == [0, 0]
    for value, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)


class Warned(keras.callbacks.Callback):
    """Sends this process a signal after a batch, at once or after some seconds."""

    def __init__(self, epoch, batch, number, seconds=0.0):
        super().__init__()
        self.at, self.number, self.seconds = (epoch, batch), number, seconds

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at and self.seconds:
            threading.Timer(self.seconds, os.kill, (os.getpid(), self.number)).start()
        elif (self.epoch, batch) == self.at:
            os.kill(os.getpid(), self.number)


class Stream:
    """Thirteen batches in each epoch, always the same ones."""

    def __init__(self, x, y):
        self.parts = [(x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]) for index in range(13)]

    def __iter__(self):
        return iter(self.parts)


@pytest.mark.parametrize("window", [4, 20])
def test_asynchronous_workers_that_read_a_stream_resume_in_the_same_epoch(window, pools, data, make_model, tmp_path):
    stream, how = Stream(*data(104)), {"checkpoint": choros.Checkpoint(tmp_path, every=5), "verbose": 0}

    def fit(**more):
        trainer = choros.Trainer(make_model(), choros.AEASGD(window=window), workers=2, pool=pools(2), timeout=60)
        return trainer.fit(stream, **how | more)

    fit(epochs=1)
    assert fit(epochs=3, resume=True).epoch == [1, 2]
    assert fit(epochs=5, resume=True).run.rows == 2 * 104  # each batch of two epochs once
    for path in CheckpointStore(tmp_path).paths():
        path.unlink()
    with pytest.raises(SystemExit):
        fit(epochs=3, callbacks=[Warned(1, 8, signal.SIGTERM)])
    first = CheckpointStore(tmp_path).latest().facts["epoch"]
    assert fit(epochs=3, resume=True).epoch == list(range(first, 3))


@pytest.mark.parametrize("algorithm", [choros.AllReduce(), choros.AEASGD(window=3)])
def test_a_fit_with_fewer_epochs_than_its_checkpoint_trains_nothing(algorithm, pools, data, make_model, same, tmp_path):
    def fit(epochs):
        trainer = choros.Trainer(model := make_model(), algorithm, workers=2, pool=pools(2))
        how = {"batch_size": 10, "checkpoint": tmp_path, "resume": True, "verbose": 0}
        return model, trainer.fit(*data(), epochs=epochs, **how).epoch

    (ended, epochs), (again, none), (_, rest) = fit(3), fit(2), fit(4)
    same(again, ended, tolerance=0)
    assert (epochs, none, rest) == ([0, 1, 2], [], [3])


def test_a_fit_that_trains_nothing_says_where_the_figures_are(pools, data, make_model, tmp_path, capsys):
    """Its history is empty; the file of a CSVLogger has the epochs of all calls."""
    table = tmp_path / "epochs.csv"
    histories = []
    for _ in range(2):
        logger = keras.callbacks.CSVLogger(table, append=True)
        trainer = choros.Trainer(make_model(), workers=2, pool=pools(2))
        how = {"batch_size": 10, "checkpoint": tmp_path / "state", "resume": True, "verbose": 2}
        histories.append(trainer.fit(*data(), epochs=2, callbacks=[logger], **how))
    assert [len(history.epoch) for history in histories] == [2, 0]
    assert histories[1].history == {}
    assert histories[1].run.rows == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("choros: nothing was trained, so history.history is empty: ")
    assert "CSVLogger" in last
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["epoch", "0", "1"]


NOISE = """
training = False

class Begins(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        globals()["training"] = True

class Noise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)
    def call(self, inputs, training=None):
        noise = keras.random.normal((1,), seed=self.seed)
        if training and globals()["training"]:
            print("done", float(noise[0]), flush=True)
        return inputs + noise

model = keras.Sequential([keras.Input((8,)), Noise(), keras.layers.Dense(3, "softmax")])
model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
trainer = choros.Trainer(model, asynchronous)
more = {"resume": True, "callbacks": [Begins()], "checkpoint": sys.argv[1]}
trainer.fit(x, y, **how | {"epochs": int(sys.argv[2])}, **more)
"""


def test_random_layers_of_an_asynchronous_job_draw_other_numbers_after_a_resume(tmp_path):
    (tmp_path / "script.py").write_text(MODEL + NOISE)
    numbers = []
    for epochs in ("1", "2"):
        command = ["-m", "choros", "run", "-n", "2", tmp_path / "script.py", tmp_path / "state", epochs]
        job = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)
        assert job.returncode == 0, job.stderr
        numbers.append(re.findall(r"done (\S+)", job.stdout))
        assert len(set(numbers[-1])) >= 4
    assert not set(numbers[0]) & set(numbers[1])


class Batches(keras.callbacks.Callback):
    """Stores the numbers of the batches whose begin and end hooks were called."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)


@keras.saving.register_keras_serializable("tests")
class Rows(keras.metrics.Sum):
    """The number of rows that were trained in an epoch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.ones_like(y_true))


def test_metrics_count_no_batch_twice_if_a_worker_exchanges_while_a_checkpoint_is_copied(
    pools, data, make_model, tmp_path, monkeypatch
):
    x, y = data(24)
    copy = ControlBlock.export_positions

    def copy_late(control_block):
        time.sleep(0.3)
        return copy(control_block)

    monkeypatch.setattr(ControlBlock, "export_positions", copy_late)

    class Slowly(keras.utils.PyDataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(0.05)
            return x[index * 3 : index * 3 + 3], y[index * 3 : index * 3 + 3]

    def fit(**how):
        model = make_model()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Rows(name="rows")])
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=1), workers=2, pool=pools(2))
        return trainer.fit(Slowly(), epochs=3, verbose=0, checkpoint=tmp_path, **how)

    with pytest.raises(SystemExit):
        fit(callbacks=[Warned(1, 2, signal.SIGUSR1)])
    batches = Batches()
    history = fit(resume=True, callbacks=[batches])
    assert history.epoch == [1, 2]
    assert batches.begun == batches.ended
    assert history.history["rows"] == [24, 24]


def test_batch_hooks_begin_where_rank_0_resumes_in_a_later_epoch_than_the_callbacks(pools, data, make_model, tmp_path):
    x, y = data(24)
    pool = pools(2)
    late = pool.start().pids[1]

    class Uneven(keras.utils.PyDataset):
        """The second worker of the first fit does not end its second epoch."""

        reads = 0

        def __len__(self):
            return 8

        def __getitem__(self, index):
            self.reads += 1
            time.sleep(60 if os.getpid() == late and self.reads > 8 else 0.05)
            return x[index * 3 : index * 3 + 3], y[index * 3 : index * 3 + 3]

    def fit(**how):
        model = make_model()
        model.compile("sgd", "sparse_categorical_crossentropy")
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=1), workers=2, pool=pool)
        return trainer.fit(Uneven(), epochs=3, verbose=0, checkpoint=tmp_path, **how)

    with pytest.raises(SystemExit):
        # After 0.2 s the first worker is in the next epoch.
        fit(callbacks=[Warned(1, 7, signal.SIGUSR1, seconds=0.2)])
    batches = Batches()
    assert fit(resume=True, callbacks=[batches]).epoch == [1, 2]
    assert batches.begun == batches.ended
