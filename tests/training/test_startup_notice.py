"""The lines while workers start, and the clock of the first progress bar or line."""

import logging
import re
import time

import keras
import numpy as np
import pytest

import choros
from choros.training.callback_runner import CallbackRunner
from choros.training.startup_notice import StartupNotice


@pytest.fixture
def lines(monkeypatch):
    """The messages of Choros."""
    messages = []
    monkeypatch.setattr(
        logging.getLogger("choros").handlers[0], "emit", lambda record: messages.append(record.getMessage())
    )
    return messages


def test_a_line_while_workers_start_and_a_bar_that_starts_with_training(lines, capsys):
    """A second fit with the same workers has no line: nothing is started."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    with choros.Trainer(model, workers=1) as trainer:
        begun = time.perf_counter()
        trainer.fit(x, x[:, 0], epochs=2, batch_size=8)
        took = time.perf_counter() - begun
        assert lines == [f"starting 1 worker ({keras.backend.backend()}) ..."]
        first = capsys.readouterr().out.partition("Epoch 2/2")[0]
        trainer.fit(x, x[:, 0], epochs=1, batch_size=8)
        assert len(lines) == 1
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    steps = [float(number) * units[unit] for number, unit in re.findall(r"(\d+)(s|ms|us)/step", first)]
    assert steps
    assert max(steps) < took / 5, first


class SlowToCompile(keras.layers.Layer):
    """A layer whose first training step in a process takes 3 seconds more."""

    steps = 0

    def call(self, x, training=False):
        if training:
            type(self).steps += 1
            if type(self).steps == 1:
                time.sleep(3)
        return x


def test_the_line_of_the_first_epoch_begins_with_training(capsys):
    """With verbose=2, as the bar: the first step compiles."""
    model = keras.Sequential([keras.Input((4,)), SlowToCompile(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    with choros.Trainer(model, workers=1) as trainer:
        trainer.fit(x, x[:, 0], epochs=2, batch_size=8, verbose=2)
    output = capsys.readouterr().out
    seconds = re.findall(r"^8/8 - (\d+)s - ", output, flags=re.MULTILINE)
    assert len(seconds) == 2, output
    assert max(map(int, seconds)) <= 1, output


def test_a_terminal_gets_the_seconds(lines, monkeypatch):
    notice = StartupNotice("2 workers (jax)")
    notice.ready()
    assert lines == ["starting 2 workers (jax) ..."]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    notice.ready()
    assert re.fullmatch(r"2 workers \(jax\) ready after \d+\.\d s", lines[1])
    StartupNotice("").ready()
    assert len(lines) == 2


def test_bars_are_made_again():
    bar, other = keras.callbacks.ProgbarLogger(), keras.callbacks.Callback()
    bar.progbar = object()
    StartupNotice.restart_bars([bar, other])
    assert bar.progbar is None


def test_an_asynchronous_rank_0_that_is_an_epoch_ahead_leaves_the_bar(capsys):
    """Its first reported batch may be of the second epoch: the bar of the first one then ends without a batch."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    runner = CallbackRunner(model, None, 1, 2, 8)
    runner.notice, runner.synchronous = StartupNotice(""), False
    runner.begin(0)
    runner.batch(1, 0, {"loss": 1.0})
    runner.epoch_end(0, {"loss": 1.0})
    runner.batch(1, 7, {"loss": 0.5})
    runner.epoch_end(1, {"loss": 0.5})
    printed = capsys.readouterr().out
    assert printed.count("8/8") >= 2, printed
    assert "loss: 1.0000" in printed
