"""The weights that callbacks see: they are those of the logs, and a callback that changes nothing changes nothing."""

import pathlib
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest

import choros
from choros.transport.shared_centre import SharedCentre

K = keras.callbacks


class Draws(K.Callback):
    """Monte Carlo dropout: the model is called as in training, which moves its seeds."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def on_epoch_end(self, epoch, logs=None):
        self.model(self.x, training=True)


@pytest.mark.parametrize("algorithm", ["downpour", "aeasgd"])
def test_random_numbers_are_no_new_weights(algorithm, make_model, data, pools, monkeypatch):
    calls, replace = [], SharedCentre.replace
    monkeypatch.setattr(SharedCentre, "replace", lambda *args: (calls.append(1), replace(*args)))
    x, y = data()
    how = {"batch_size": 8, "epochs": 3, "verbose": 0}
    trainer = choros.Trainer(make_model(dropout=0.5), algorithm, workers=2, pool=pools(2))
    trainer.fit(x, y, callbacks=[Draws(x)], **how)
    assert calls == []
    setter = K.LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.model.layers[0].bias.assign(np.ones(6)))
    trainer.fit(x, y, callbacks=[setter], **how)
    assert calls


JOB = """
    import os, sys, time
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        sys.modules["tensorflow"] = sys.modules["sklearn"] = None
    import keras, numpy as np
    import choros
    from choros.cluster import Place

    rank = Place.here().rank
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 3, 64)
    x[:, 0] += y

    def make(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3, "softmax")])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    def fit(algorithm, callbacks, optimizer="sgd", **how):
        model = make(optimizer)
        trainer = choros.Trainer(model, algorithm)
        how = {"batch_size": 8, "epochs": 3, "seed": 1, "verbose": 0, "callbacks": callbacks} | how
        return model, trainer.fit(x, y, **how)
"""


@pytest.fixture
def job(tmp_path):
    """Run text after ``JOB`` on two ranks of a job; what each printed after ``out``, as dicts."""

    def run(text, ranks=2):
        pathlib.Path(tmp_path, "script.py").write_text(textwrap.dedent(JOB) + textwrap.dedent(text))
        words = [sys.executable, "-m", "choros", "run", "-n", str(ranks), "script.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_callback_leaves_the_velocity_of_a_rank_alone(job):
    text = job(
        """
        look = keras.callbacks.LambdaCallback
        nothing = lambda *args, **kwargs: None
        read = lambda epoch, logs: model_of[0].get_weights()
        sums = []
        for hooks in ({}, {"on_epoch_end": nothing}, {"on_train_batch_end": nothing}):
            how = choros.EAMSGD(window=3, momentum=0.9)
            trainer = choros.Trainer(model := make("sgd"), how, meet="together")
            trainer.fit(x, y, batch_size=8, epochs=3, seed=1, verbose=0, callbacks=[look(**hooks)] if hooks else [])
            sums.append([w.tobytes().hex() for w in model.get_weights()])
        print("same", [each == sums[0] for each in sums], flush=True)
        """
    )
    assert text.count("same [True, True, True]") == 2, text
