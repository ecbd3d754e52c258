"""A worker that raises, is killed or hangs: the caller is told in seconds, with the last center."""

import gc
import os
import re
import resource
import signal
import threading
import time
import types

import keras
import numpy as np
import pytest

import choros
from choros.errors import CommTimeoutError, InvalidInputError, WorkerFailedError
from choros.training.async_control import hang_detection
from choros.training.async_control.control_block import ControlBlock
from choros.training.spec import FitConfig, TrainerControl


class Failing(keras.utils.PyDataset):
    """Batches that fail in one rank, at one step."""

    def __init__(self, how, rank=1, step=12, batches=400):
        super().__init__()
        self.how, self.rank, self.step, self.batches, self.done = how, rank, step, batches, 0

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        self.done += 1
        if self.done == self.step and os.environ.get("CHOROS_WORKER") and self._mine():
            print("about to fail")
            if self.how == "raise":
                raise ArithmeticError("the data are bad")
            if self.how == "memory":
                raise MemoryError
            if self.how == "late":
                time.sleep(5)  # which of a killed one is not waited for
                return self[index]
            os.kill(os.getpid(), self.how)
        time.sleep(0.002)
        rng = np.random.default_rng(index)
        return rng.normal(size=(8, 8)).astype("float32"), rng.integers(0, 3, 8)

    def _mine(self):
        import sys

        return int(sys.argv[-2]) == self.rank  # the workers' own arguments: descriptor, rank, size


def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    made.compile("adam", "sparse_categorical_crossentropy")
    return made


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("algorithm", "how", "message"),
    [
        ("allreduce", "raise", "the data are bad"),
        ("allreduce", "memory", "MemoryError"),
        ("allreduce", signal.SIGKILL, "SIGKILL"),
        ("allreduce", signal.SIGSEGV, "SIGSEGV"),
        ("localsgd", signal.SIGKILL, "SIGKILL"),
        ("aeasgd", "raise", "the data are bad"),
        ("aeasgd", signal.SIGKILL, "SIGKILL"),
    ],
)
def test_the_caller_hears_of_it(algorithm, how, message, children):
    trained = model()
    before = [np.array(w) for w in trained.get_weights()]
    already = children()
    fds = len(os.listdir("/proc/self/fd"))
    trainer = choros.Trainer(trained, algorithm, workers=2, echo=False)
    begun = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        trainer.fit(Failing(how), epochs=1, verbose=0)
    error = caught.value
    assert error.rank == 1
    assert error.host
    assert message in str(error)
    assert "about to fail" in error.output
    if isinstance(how, str):
        assert "__getitem__" in error.traceback
    else:
        assert error.signal == message
        assert "With restarts=3" in str(error)
        assert error.peak_memory > 1 << 20
    assert time.monotonic() - begun < 90
    for old, new in zip(before, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)  # the given model is unchanged
    assert [w.shape for w in error.weights] == [w.shape for w in before]
    assert any(np.abs(w - old).max() > 0 for w, old in zip(error.weights, before, strict=True)), "no center came back"
    soon = time.monotonic() + 5  # a thread of JAX's may have a file of its own open
    while (now := len(os.listdir("/proc/self/fd"))) > fds and time.monotonic() < soon:
        time.sleep(0.05)
    assert now <= fds
    assert children() <= already


def test_a_stopped_worker_is_named_within_the_timeout():
    trainer = choros.Trainer(model(), "allreduce", workers=2, echo=False, timeout=3, first_timeout=30)
    with pytest.raises(WorkerFailedError, match="rank 1|Worker 1|worker 1") as caught:
        trainer.fit(Failing(signal.SIGSTOP), epochs=1, verbose=0)
    assert "3" in str(caught.value)


def test_interrupting_stops_the_workers_and_keeps_the_model_usable(children, capfd):
    trained, already = model(), children()
    trainer = choros.Trainer(trained, "aeasgd", workers=2, echo=False)
    timer = threading.Timer(20.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Failing(signal.SIGKILL, step=-1, batches=100_000), epochs=1, verbose=2)
    timer.join()
    assert children() <= already
    assert "the workers have ended, the model has the latest weights." in capfd.readouterr().out
    assert np.isfinite(trained.predict(np.zeros((2, 8), "float32"), verbose=0)).all()


def test_an_interrupt_that_python_ignores_in_a_garbage_collection_ends_training(children):
    """As JAX has a callback of the collector, in which the handler of SIGINT may run."""
    already = children()

    def interrupted(phase, info):
        gc.callbacks.remove(interrupted)
        signal.raise_signal(signal.SIGINT)

    def collect(epoch, logs=None):
        gc.callbacks.append(interrupted)
        gc.collect(0)

    trainer = choros.Trainer(model(), "aeasgd", workers=2, echo=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            Failing(signal.SIGKILL, step=-1, batches=10_000),
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=collect)],
        )
    assert children() <= already


def test_a_process_without_free_descriptors_is_told_its_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    trainer = choros.Trainer(model(), workers=2, echo=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(InvalidInputError, match=r"another file or socket \(its limit is 3\).*ulimit -n"):
            trainer.fit(Failing("raise", step=-1, batches=2), verbose=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(trainer.fit(Failing("raise", step=-1, batches=2), verbose=0).epoch) == 1


def test_a_pool_that_lost_a_worker_starts_anew():
    with choros.WorkerPool(2, echo=False) as pool:
        trainer = choros.Trainer(model(), "allreduce", workers=2, pool=pool)
        with pytest.raises(WorkerFailedError):
            trainer.fit(Failing(signal.SIGKILL), epochs=1, verbose=0)
        x, y = np.zeros((16, 8), "float32"), np.zeros(16, "int32")
        assert len(trainer.fit(x, y, batch_size=8, verbose=0).history["loss"]) == 1


def test_the_last_worker_dies_after_another_had_done_its_work_and_ended(monkeypatch):
    """Nobody is left then to wait for: what the last one met is told, not that the pool is empty."""
    from choros.training.executors import local

    handle, following = local.LocalRun.handle, local.LocalRun.next
    trainer = choros.Trainer(model(), "aeasgd", workers=2, echo=False)
    pids = {}

    def handle_and_kill(self, rank, message, blobs):
        if isinstance(message, local.messages.WorkerDone):
            pids.update(enumerate(trainer._local.pool.start().pids))
            os.kill(pids.pop(rank), signal.SIGKILL)
        handle(self, rank, message, blobs)

    def seen(self, timeout):
        result = following(self, timeout)
        while result is not None and isinstance(result[1], local.RankFailure) and pids:
            os.kill(pids.popitem()[1], signal.SIGKILL)
        return result

    monkeypatch.setattr(local.LocalRun, "handle", handle_and_kill)
    monkeypatch.setattr(local.LocalRun, "next", seen)
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 .* SIGKILL"):
        trainer.fit(Failing("late", batches=40), epochs=1, verbose=0)


def load(path):
    """The first process that loads this is killed meanwhile; others take a second."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        time.sleep(1)
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Loaded:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return load, (self.path,)


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_is_killed_while_others_load_the_model(algorithm, restarts, tmp_path, data, make_model):
    x, y = data()
    model = make_model()
    model.loaded = Loaded(str(tmp_path / "loaded"))
    with choros.Trainer(model, algorithm, workers=2, restarts=restarts) as trainer:
        if restarts:
            history = trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
            assert len(history.history["loss"]) == 2
            assert [each.signal for each in history.run.restarts] == ["SIGKILL"]
        else:
            with pytest.raises(WorkerFailedError, match="SIGKILL") as failed:
                trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
            assert failed.value.signal == "SIGKILL"
            assert failed.value.rank in (0, 1)


KILLED_EARLY = """
import os, signal, sys
if "choros.launch.process.pool_worker" in sys.orig_argv and sys.orig_argv[-2] == "1" and os.path.exists({flag!r}):
    os.unlink({flag!r})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_is_killed_while_its_interpreter_starts(
    restarts, tmp_path, data, make_model, monkeypatch, children
):
    flag, already = tmp_path / "flag", children()
    flag.touch()
    (tmp_path / "sitecustomize.py").write_text(KILLED_EARLY.format(flag=str(flag)))
    monkeypatch.syspath_prepend(str(tmp_path))
    x, y = data()
    trainer = choros.Trainer(make_model(), workers=2, restarts=restarts)
    if restarts:
        history = trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        assert [(each.rank, each.signal) for each in history.run.restarts] == [(1, "SIGKILL")]
    else:
        with pytest.raises(WorkerFailedError, match="SIGKILL") as failed:
            trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert (failed.value.rank, failed.value.signal) == (1, "SIGKILL")
    assert children() <= already


@pytest.mark.every(2)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_is_stopped_while_its_interpreter_starts(
    restarts, tmp_path, data, make_model, monkeypatch, children
):
    flag, already = tmp_path / "flag", children()
    flag.touch()
    (tmp_path / "sitecustomize.py").write_text(KILLED_EARLY.format(flag=str(flag)).replace("SIGKILL", "SIGSTOP"))
    monkeypatch.syspath_prepend(str(tmp_path))
    x, y = data()
    trainer = choros.Trainer(make_model(), workers=2, restarts=restarts)
    reason = r"^worker 1 of 2 .* has been stopped by a signal for 10 s, before it had started"
    if restarts:
        history = trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert re.search(reason, history.run.restarts[0].reason)
    else:
        with pytest.raises(WorkerFailedError, match=reason) as failed:
            trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert failed.value.rank == 1
    assert children() <= already


def test_a_member_that_is_killed_after_its_work_takes_nothing_with_it(monkeypatch):
    from choros.training.executors import local

    handle, killed = local.LocalRun.handle, []
    trainer = choros.Trainer(model(), "ensemble", workers=2, echo=False)

    def handle_and_kill(self, rank, message, blobs):
        if isinstance(message, local.messages.WorkerDone) and not killed:
            killed.append(rank)
            os.kill(trainer._local.pool.start().pids[rank], signal.SIGKILL)
        handle(self, rank, message, blobs)

    monkeypatch.setattr(local.LocalRun, "handle", handle_and_kill)
    trainer.fit(Slow(), epochs=1, verbose=0)
    assert killed == [0]
    assert len(trainer.models) == 2


def test_a_member_that_is_killed_when_the_others_have_done_their_work_is_told_at_once(monkeypatch):
    from choros.training.executors import local

    handle, killed = local.LocalRun.handle, []
    trainer = choros.Trainer(model(), "ensemble", workers=2, echo=False)

    def handle_and_kill(self, rank, message, blobs):
        if isinstance(message, local.messages.WorkerDone):
            killed.append(time.monotonic())
            os.kill(trainer._local.pool.start().pids[1 - rank], signal.SIGKILL)
        handle(self, rank, message, blobs)

    monkeypatch.setattr(local.LocalRun, "handle", handle_and_kill)
    monkeypatch.setattr(trainer._local.pool, "kill", lambda: ended.append(time.monotonic()))
    ended = []
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 .* SIGKILL"):
        trainer.fit(Slow(), epochs=1, verbose=0)
    assert ended[0] - killed[0] < 4


@pytest.mark.parametrize("algorithm", ["aeasgd", "ensemble"])
def test_a_worker_that_hangs_is_told_while_the_others_train(algorithm):
    begun = time.monotonic()
    trainer = choros.Trainer(model(), algorithm, workers=2, timeout=3)
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 .* made no step for 3 s") as failed:
        trainer.fit(Failing(signal.SIGSTOP, batches=100_000), epochs=1, verbose=0)
    assert failed.value.rank == 1
    assert failed.value.host
    assert failed.value.peak_memory > 1 << 20
    assert time.monotonic() - begun < 120  # the other one would train for minutes


class Stops(keras.callbacks.Callback):
    """Stops worker 1 of a trainer when training begins (epoch None) or at the end of an epoch, and notes the time."""

    def __init__(self, trainer, epoch):
        super().__init__()
        self.trainer, self.epoch = trainer, epoch

    def stop(self, now):
        if now == self.epoch:
            os.kill(self.trainer._local.pool._pool.pids[1], signal.SIGSTOP)
            self.stopped = time.monotonic()

    def on_train_begin(self, logs=None):
        self.stop(None)

    def on_epoch_end(self, epoch, logs=None):
        self.stop(epoch)


def test_a_synchronous_worker_that_hangs_is_named_after_the_timeout():
    trainer = choros.Trainer(model(), workers=2, timeout=3, echo=False)
    stops = Stops(trainer, epoch=1)
    x = np.zeros((32, 8), "float32")
    waited = "does not answer: rank 0 .* waited"  # the usual message; on a slow machine the caller may be first
    with pytest.raises(WorkerFailedError, match=rf"^worker 1 of 2 .* ({waited}|made no step for 3 s)") as failed:
        trainer.fit(x, np.zeros(32, "int32"), epochs=9, verbose=0, callbacks=[stops])
    assert time.monotonic() - stops.stopped < 30
    assert failed.value.rank == 1
    assert failed.value.host
    assert failed.value.peak_memory > 1 << 20


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd", "ensemble"])
def test_a_worker_that_is_stopped_before_its_first_step_is_named_after_the_timeout(algorithm):
    """It may have been an idle worker of an earlier fit. It compiles nothing, so it does not get ``first_timeout``."""
    trainer = choros.Trainer(model(), algorithm, workers=2, timeout=3, first_timeout=500, echo=False)
    stops = Stops(trainer, epoch=None)
    x = np.zeros((32, 8), "float32")
    with pytest.raises(WorkerFailedError, match=r"^worker 1 of 2 .* made no step for 3 s") as failed:
        trainer.fit(x, np.zeros(32, "int32"), epochs=9, verbose=0, callbacks=[stops])
    assert time.monotonic() - stops.stopped < 30
    assert failed.value.rank == 1


class Slow(keras.utils.PyDataset):
    """One worker's batches take longer by far."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import sys

        if os.environ.get("CHOROS_WORKER") and int(sys.argv[-2]) == 1:
            time.sleep(0.7)
        return np.zeros((8, 8), "float32"), np.zeros(8, "int32")


def test_a_member_that_waits_for_callbacks_of_slower_ones_is_no_hang():
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)]
    trainer = choros.Trainer(model(), "ensemble", workers=2, timeout=2)
    history = trainer.fit(Slow(), epochs=5, verbose=0, callbacks=callbacks)
    assert len(history.history["loss"]) == 5


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "aeasgd"])
def test_a_slow_callback_of_a_batch_is_no_hang(algorithm, data, make_model):
    x, y = data(64)  # batches of one shape: to compile another one counts within the timeout
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(4 if batch == 2 else 0))
    with choros.Trainer(make_model(), algorithm, workers=2, timeout=2) as trainer:
        assert len(trainer.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[slow]).history["loss"]) == 2


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_a_slow_callback_ends_no_run_of_a_launcher(hook, algorithm, data, make_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = data(64)
    slow = keras.callbacks.LambdaCallback(**{hook: lambda number, logs: time.sleep(7 if number == 1 else 0)})
    trainer = choros.Trainer(make_model(), algorithm, workers=2, launcher=choros.Ssh("localhost:2"), timeout=4)
    assert len(trainer.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[slow]).history["loss"]) == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_hangs_is_told_where_callbacks_want_each_batch(rank):
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    trainer = choros.Trainer(model(), workers=2, timeout=3)
    with pytest.raises(WorkerFailedError, match="of 2 .* made no step for") as failed:
        trainer.fit(Failing(signal.SIGSTOP, rank=rank), epochs=1, verbose=0, callbacks=[each])
    assert failed.value.rank == rank


class Noted:
    """A control block whose heartbeats a test sets."""

    def __init__(self):
        self.count = np.ones(2)

    def step_counts(self):
        return self.count.copy()


def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(hang_detection.time, "monotonic", lambda: clock[0])
    control_block = Noted()
    watch = hang_detection.HeartbeatMonitor(
        control_block, types.SimpleNamespace(workers=2, whole_epochs=False, ensemble=False)
    )
    for _ in range(4):
        clock[0] += 0.5
        control_block.count[0] += 1
        watch.poll()
    assert watch.overdue(1.9, ()) == [1]
    assert watch.overdue(2.1, ()) == []
    clock[0] += 60.0  # a callback
    watch.poll()
    assert watch.overdue(4.0, ()) == []
    clock[0] += 1.0
    watch.poll()
    assert watch.overdue(3.9, {1}) == []
    assert watch.overdue(3.9, ()) == [1]


def test_ranks_that_hang_and_ranks_that_do_not_end_after_a_stop_are_different_errors(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(hang_detection.time, "monotonic", lambda: clock[0])
    control_block = ControlBlock.create(3, 1, 1)
    job = FitConfig(algorithm={}, mode="async", workers=3, epochs=1, batch_size=3, timeout=4.0, first_timeout=9.0)
    hangs = hang_detection.JobHangs(control_block, job, 0, ["a", "b", "c"])
    for _ in range(6):
        clock[0] += 1.0
        control_block.count_step(0)
        if clock[0] < 102.0:
            control_block.count_step(1)
        if clock[0] < 106.0:
            hangs.check()
    with pytest.raises(
        CommTimeoutError, match=r"^rank 1 on b \(3 ranks in all\) made no step within 4 s, or"
    ) as caught:
        hangs.check()
    assert caught.value.missing == (1,)
    control_block.publish(TrainerControl(stop=True))
    clock[0] += 1.0
    hangs.check()
    clock[0] += 9.5
    with pytest.raises(
        CommTimeoutError, match="within 9 s of the stop; one of these hangs: rank 1 on b and rank 2 on c"
    ):
        hangs.check()
    control_block.close()
