"""The backend's profiler for a window of steps; training goes on whatever becomes of it."""

import keras
import numpy as np
import pytest

import choros.hvd as hvd
from choros.errors import InvalidInputError


@pytest.fixture
def at_once(backend):
    """Steps in one call of Keras' loop; PyTorch has no more than one."""
    return 1 if backend == "torch" else 2


@pytest.fixture
def fit(at_once):
    hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=at_once)

    def start(*callbacks):
        x = np.ones((40, 3), "float32")
        return model.fit(x, x[:, :2], batch_size=4, epochs=1, verbose=0, callbacks=list(callbacks)).history["loss"]

    yield start
    hvd.shutdown()


class Note(keras.callbacks.Callback):
    """Record which calls of the loop another callback profiles."""

    def __init__(self, other):
        super().__init__()
        self.other, self.running = other, []

    def on_train_batch_begin(self, batch, logs=None):
        if self.other.profiler is not None and self.other.profiler.running:
            self.running.append(batch)


def test_windows(fit, at_once, tmp_path, capsys):
    """A window inside, one that the end of training cuts, one that never comes, and one on another rank."""
    Profile = hvd.callbacks.ProfileCallback
    windows = {
        "inside": Profile(tmp_path / "inside", first_step=2, steps=3),
        "cut": Profile(tmp_path / "cut", first_step=8, steps=9),
        "late": Profile(tmp_path / "late", first_step=10),
        "other": Profile(tmp_path / "other", first_step=0, ranks=[1]),
    }
    running = {"inside": [2, 4] if at_once == 2 else [2, 3, 4], "cut": [8] if at_once == 2 else [8, 9]}
    for name, callback in windows.items():
        note = Note(callback)
        assert len(fit(callback, note)) == 1
        assert note.running == running.get(name, [])
        made = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert bool(made) is (name in ("inside", "cut")), made
        assert all(path.relative_to(tmp_path / name).parts[0] == "rank-0" for path in made)
        assert all(path.stat().st_size for path in made)
    assert capsys.readouterr().err == ""


def test_training_goes_on_without(fit, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert len(fit(hvd.callbacks.ProfileCallback(tmp_path / "file", first_step=1))) == 1
    stderr = capsys.readouterr().err.splitlines()
    assert len(stderr) == 1
    assert "rank 0 could not start the profiler of " in stderr[0]


@pytest.mark.parametrize(("first_step", "steps"), [(-1, 1), (0, 0)])
def test_what_is_no_window(first_step, steps):
    with pytest.raises(InvalidInputError, match="give a whole number, [01] or more"):
        hvd.callbacks.ProfileCallback("profile", first_step, steps)
