"""Workers stay after a fit, and serve the next one only if new workers would be the same."""

import enum
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import keras
import numpy as np
import pytest

import choros
from choros.errors import InvalidInputError, WorkerFailedError
from choros.training.executors import idle_workers, local
from choros.training.model_io.serialization import copy_model

X, Y = np.ones((16, 3), "float32"), np.ones(16, "float32")


def make_model(layer=None):
    hidden = [] if layer is None else [layer]
    model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(layer=None, algorithm="allreduce", **options):
    return choros.Trainer(make_model(layer), algorithm, **{"workers": 2, "echo": False, **options}).fit(X, Y, verbose=0)


def pids():
    return idle_workers._idle[0].processes.pool.pids if idle_workers._idle else ()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Begin and end without idle workers."""
    choros.close()
    monkeypatch.delenv(idle_workers.VARIABLE, raising=False)
    yield
    choros.close()


def test_another_trainer_uses_the_same_processes_until_they_are_closed():
    fit()
    before = pids()
    fit()
    assert pids() == before
    choros.close()
    assert not pids()
    assert not any(map(alive, before))


def test_a_trainer_ends_its_workers():
    trainer = choros.Trainer(make_model(), workers=2, echo=False)
    trainer.fit(X, Y, verbose=0)
    before = pids()
    trainer.close()
    assert not pids()
    assert not any(map(alive, before))


@pytest.mark.parametrize("other", [{"workers": 1}, {"threads": 2}, {"bind": False}])
def test_other_settings_start_other_processes(other):
    fit()
    before = pids()
    fit(**other)
    assert not {*pids()} & {*before}
    assert not any(map(alive, before))


def test_another_environment_directory_or_path_starts_other_processes(monkeypatch, tmp_path):
    fit()
    seen = [pids()]
    changes = (
        lambda: monkeypatch.setenv("SETTING", "1"),
        lambda: monkeypatch.chdir(tmp_path),
        lambda: monkeypatch.syspath_prepend(tmp_path),
    )
    for change in changes:
        change()
        fit()
        assert not {*pids()} & {pid for earlier in seen for pid in earlier}
        seen.append(pids())


LAYER = """
    import keras

    class Factor(keras.layers.Layer):
        def call(self, inputs):
            return {factor} * inputs
"""


def test_a_module_that_is_edited_between_two_fits_is_loaded_again(monkeypatch, tmp_path):
    module = tmp_path / "edited_between_fits.py"
    monkeypatch.syspath_prepend(tmp_path)
    losses = []
    for number, factor in enumerate((0.0, 2.0, 2.0)):
        if number < 2:
            module.write_text(textwrap.dedent(LAYER.format(factor=factor)))
            os.utime(module, ns=(10**9 * (number + 1), 10**9 * (number + 1)))  # before the workers were started
            sys.modules.pop("edited_between_fits", None)
        import edited_between_fits

        keras.utils.set_random_seed(1)
        before = pids()
        losses.append(fit(edited_between_fits.Factor()).history["loss"][0])
        assert (pids() == before) == (number == 2)
    assert losses[0] == 1.0
    assert losses[1] != 1.0
    assert losses[2] == losses[1]
    sys.modules.pop("edited_between_fits")


def test_a_module_that_was_written_after_the_workers_began_ends_them(monkeypatch, tmp_path):
    module = tmp_path / "written_later.py"
    monkeypatch.syspath_prepend(tmp_path)
    fit()
    module.write_text(textwrap.dedent(LAYER.format(factor=1.0)))
    import written_later

    fit(written_later.Factor())
    before = pids()
    fit(written_later.Factor())
    assert not {*pids()} & {*before}
    sys.modules.pop("written_later")


def test_a_class_that_is_defined_again_is_used():
    losses = []
    for value in (0.0, 3.0):

        class Constant(keras.layers.Layer):
            def call(self, inputs, value=value):
                return 0.0 * inputs + value

        keras.utils.set_random_seed(1)
        losses.append(fit(Constant()).history["loss"][0])
    assert losses[0] == 1.0
    assert losses[1] != 1.0


class Doubled(keras.layers.Dense):
    """A class that is sent by value, as those of a script."""


def test_a_method_that_was_deleted_from_a_class_is_used_no_more(monkeypatch):
    monkeypatch.setattr(Doubled, "__module__", "__main__")

    def loss():
        keras.utils.set_random_seed(1)
        return fit(Doubled(3, kernel_initializer="ones")).history["loss"][0]

    Doubled.call = lambda self, inputs, training=None: 100 * keras.layers.Dense.call(self, inputs)
    patched = loss()
    del Doubled.call
    before = pids()
    assert loss() < patched / 100
    assert pids() == before


def test_a_directory_that_was_made_again_starts_other_processes(monkeypatch, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    fit()
    before = pids()
    os.chdir(tmp_path)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    os.chdir(folder)
    fit()
    assert not set(pids()) & set(before)


def test_a_deleted_directory_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(InvalidInputError, match=r"working directory was deleted.*os\.chdir"):
        fit()


def test_modules_beside_an_environment_are_not_installed(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (tmp_path / "mine.py").write_text("")
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "theirs.py").write_text("")
    code = (
        "import mine, theirs; from choros.training.worker.loaded_files import loaded_files; "
        "print(*map(str, loaded_files(4e9)))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [str(tmp_path / "bin" / "python"), "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path / "mine.py") in done.stdout.split()
    assert str(packages / "theirs.py") not in done.stdout
    assert os.__file__ not in done.stdout


def test_a_fit_that_is_refused_leaves_the_other_one_its_workers():
    trainer, refused = choros.Trainer(make_model(), workers=2, echo=False), []

    class Again(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with pytest.raises(InvalidInputError, match="training already") as error:
                trainer.fit(X, Y, verbose=0)
            refused.append(error)

    history = trainer.fit(X, Y, epochs=2, verbose=0, callbacks=[Again()])
    assert len(refused) == len(history.history["loss"]) == 2


OWN_LOSSES = """
import keras
import own_numbers
ALPHA = 1.0

def scaled(y, p):
    return ALPHA * keras.losses.mean_squared_error(y, p)

def by_module(y, p):
    return own_numbers.ALPHA * keras.losses.mean_squared_error(y, p)

def by_function_of_module(y, p):
    return own_numbers.alpha() * keras.losses.mean_squared_error(y, p)
"""


@pytest.fixture(params=["scaled", "by_module", "by_function_of_module"])
def scaled_loss(request, monkeypatch, tmp_path):
    """Return a module that workers import, and a function that returns the loss of a fit of a new model with it."""
    (tmp_path / "own_numbers.py").write_text("ALPHA = 1.0\n\n\ndef alpha():\n    return ALPHA\n")
    (tmp_path / "own_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    monkeypatch.delitem(sys.modules, "own_numbers", raising=False)
    losses = importlib.import_module("own_losses")
    module = losses if request.param == "scaled" else losses.own_numbers

    def loss(algorithm, *callbacks, epochs=1):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", getattr(losses, request.param))
        trainer = choros.Trainer(model, algorithm, workers=2, echo=False)
        return trainer.fit(X, Y, epochs=epochs, verbose=0, callbacks=[*callbacks]).history["loss"][0]

    return module, loss


class SetsAlpha(keras.callbacks.Callback):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def on_epoch_begin(self, epoch, logs=None):
        self.module.ALPHA = [1.0, 100.0][epoch]


def test_the_number_that_a_module_has_in_the_caller_is_used(scaled_loss):
    module, loss = scaled_loss
    first = loss("allreduce", SetsAlpha(module), epochs=2)
    before = pids()
    assert loss("allreduce") == pytest.approx(100 * first, rel=1e-5)  # as in Keras the module keeps the number
    module.ALPHA = 1.0
    assert loss("allreduce") == first
    module.ALPHA = 10.0
    assert loss("aeasgd") > 5 * first
    assert pids() == before
    assert loss("allreduce", SetsAlpha(module), epochs=2) == first
    assert loss("allreduce", SetsAlpha(module), epochs=2) == first


ENUM_SCRIPT = """
class Kind(enum.Enum):
    DOUBLE = 2
    SAME = 1

class OfKind(keras.layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, inputs):
        return inputs * self.kind.value if self.kind in (Kind.DOUBLE, Kind.SAME) else None
"""


def test_an_enum_of_a_script_is_sent_and_stays_as_it_is():
    names = {"__name__": "__main__", "enum": enum, "keras": keras}
    exec(ENUM_SCRIPT, names)
    kind, layer = names["Kind"], names["OfKind"]
    for _ in range(2):
        fit(layer(kind.DOUBLE))
    copied = copy_model(make_model(layer(kind.DOUBLE)))
    assert copied.layers[0].kind is kind.DOUBLE
    assert [*kind] == [kind.DOUBLE, kind.SAME]


def test_workers_of_a_fit_that_failed_end():
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("stop")

    fit()
    before = pids()
    with pytest.raises(RuntimeError, match="stop"):
        choros.Trainer(make_model(), workers=2, echo=False).fit(X, Y, verbose=0, callbacks=[Fails()])
    assert not pids()
    assert not any(map(alive, before))
    assert np.isfinite(fit().history["loss"][0])


def test_an_idle_worker_that_died_is_replaced():
    fit()
    before = pids()
    os.kill(before[0], 9)
    limit = time.monotonic() + 10
    while idle_workers._idle[0].processes.pool.alive(0):
        assert time.monotonic() < limit
        time.sleep(0.01)
    fit()
    assert not {*pids()} & {*before}


def test_an_idle_worker_that_is_stopped_is_replaced():
    fit()
    before = pids()
    os.kill(before[0], signal.SIGSTOP)
    while not idle_workers._idle[0].processes.pool.stopped(0):
        time.sleep(0.01)
    begun = time.monotonic()
    fit()
    assert set(before).isdisjoint(pids())
    assert time.monotonic() - begun < 60


def kill_as_a_fit_begins(monkeypatch, ranks, times=1):
    """Kill workers after a fit has found them alive, and before it sends them the job."""
    send, kills = local.LocalRun.send, []

    def killed_first(self):
        if len(kills) < times * len(ranks):
            for rank in ranks:
                kills.append(self.pool.pids[rank])
                os.kill(kills[-1], signal.SIGKILL)
        send(self)

    monkeypatch.setattr(local.LocalRun, "send", killed_first)
    return kills


@pytest.mark.parametrize(
    ("algorithm", "restarts", "ranks"),
    [("allreduce", 0, (0,)), ("allreduce", 0, (0, 1)), ("aeasgd", 0, (1,)), ("aeasgd", 1, (1,))],
)
def test_an_idle_worker_that_dies_as_a_fit_begins_is_replaced(algorithm, restarts, ranks, monkeypatch, caplog):
    fit(algorithm=algorithm, restarts=restarts)
    before = pids()
    kills = kill_as_a_fit_begins(monkeypatch, ranks)
    begun = time.monotonic()
    history = fit(algorithm=algorithm, restarts=restarts)
    assert [before.index(pid) for pid in kills] == [*ranks]
    assert {*pids()}.isdisjoint(kills)
    assert history.run.restarts == ()
    assert history.run.rows == len(X)
    assert "SIGKILL" in caplog.text
    assert time.monotonic() - begun < 60


def test_an_idle_worker_is_replaced_once_as_a_fit_begins(monkeypatch):
    fit()
    kill_as_a_fit_begins(monkeypatch, (1,), times=2)
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 .* SIGKILL"):
        fit()


def test_a_fit_with_a_stream_replaces_no_idle_worker_once_it_has_begun_to_read(monkeypatch):
    fit()
    kill_as_a_fit_begins(monkeypatch, (1,))
    batches = ((X[:4], Y[:4]) for _ in range(4))
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 .* SIGKILL"):
        choros.Trainer(make_model(), workers=2, echo=False).fit(batches, steps_per_epoch=4, verbose=0)


def test_workers_end_after_some_seconds_without_a_fit(monkeypatch):
    monkeypatch.setenv(idle_workers.VARIABLE, "0.5")
    fit()
    before = pids()
    limit = time.monotonic() + 20
    while any(map(alive, before)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert not pids()


def test_no_worker_stays_if_the_user_wants_none(monkeypatch):
    monkeypatch.setenv(idle_workers.VARIABLE, "0")
    fit()
    assert not pids()


@pytest.mark.parametrize("text", ["-1", "nan", "soon"])
def test_another_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv(idle_workers.VARIABLE, text)
    trainer = choros.Trainer(make_model(), workers=2, echo=False)
    with pytest.raises(InvalidInputError, match=f"CHOROS_IDLE_SECONDS={text}: give a number"):
        trainer.fit(X, Y, verbose=0)
    assert not trainer._local.pool.started


def test_two_threads_have_workers_of_their_own():
    fit()
    histories = []
    threads = [threading.Thread(target=lambda: histories.append(fit())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(histories) == 2
    assert len(pids()) == 2


SCRIPT = """
    import os, sys
    import choros, keras, numpy as np
    from choros.training.executors import idle_workers

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    choros.Trainer(model, workers=2).fit(np.ones((16, 3)), np.ones(16), verbose=0)
    if os.fork() == 0:
        choros.close()  # a forked child ends no worker of its parent
        os._exit(0)
    os.wait()
    print(*idle_workers._idle[0].processes.pool.pids, flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_workers_end_with_the_process(end):
    script = textwrap.dedent(SCRIPT.format(end=end))
    environment = {name: value for name, value in os.environ.items() if name != idle_workers.VARIABLE}
    begun = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    workers = [int(pid) for pid in begun.stdout.split()]
    assert len(workers) == 2, begun.stderr
    limit = time.monotonic() + 10
    while any(map(alive, workers)):
        assert time.monotonic() < limit
        time.sleep(0.05)
