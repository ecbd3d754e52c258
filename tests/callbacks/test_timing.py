"""The duration of steps, by a clock that the test moves."""

import math
import time

import keras
import numpy as np
import pytest

import choros
from choros.callbacks import BatchTiming, SamplesPerSec
from choros.errors import InvalidInputError


@pytest.fixture
def tell(monkeypatch):
    """Drive a callback through epochs of steps of so many seconds, and seconds besides."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def drive(callback, epochs):
        callback.on_train_begin()
        for number, (steps, epoch) in enumerate(epochs):
            callback.on_epoch_begin(number)
            for step, seconds in enumerate(steps):
                callback.on_train_batch_begin(step)
                now[0] += seconds
                callback.on_train_batch_end(step)
            now[0] += epoch
            callback.on_epoch_end(number)
        callback.on_train_end()

    return drive


def test_the_median_step_the_overhead_and_what_the_first_epoch_adds(tell, capsys):
    timing = BatchTiming()
    tell(timing, [([9.0, 1.0, 1.0, 3.0], 2.0), ([1.0, 1.0, 1.0, 2.0], 0.5)])
    assert timing.steps == [1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0]
    assert (timing.median, timing.total, timing.total_but_first) == (1.0, 21.5, 5.5)
    assert timing.overhead == [16.0 - 4 * 2.0, 1.5]
    output = capsys.readouterr().out
    assert "BatchTiming: epoch 1: 16.00 s, 8.00 s of it not in steps" in output
    assert "BatchTiming: 2 epochs in 21.50 s (5.50 s without the first), a step 1000.00 ms (median)" in output
    tell(timing, [([4.0, 4.0], 0.0)])
    assert timing.steps == [4.0]  # a second fit begins anew


def test_rows_a_second(tell, capsys):
    speed = SamplesPerSec(batch_size=32, warmup=2)
    assert math.isnan(speed.median)
    tell(speed, [([9.0, 9.0, 0.5, 0.5], 1.0)])
    assert speed.samples_per_sec == 64
    assert capsys.readouterr().out.splitlines() == [
        "SamplesPerSec: epoch 1: 64 samples/s (median)",
        "SamplesPerSec: 64 samples/s (median of 2 steps)",
    ]


@pytest.mark.parametrize("make", [lambda: BatchTiming(warmup=-1), lambda: SamplesPerSec(0)])
def test_numbers_without_a_meaning(make):
    with pytest.raises(InvalidInputError, match="give"):
        make()


def test_under_a_trainer_it_sees_every_step():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    timing = choros.callbacks.BatchTiming(verbose=0)  # as the README names it
    x = np.ones((12, 2), "float32")
    choros.Trainer(model, workers=1).fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0, callbacks=[timing])
    assert (len(timing.steps), len(timing.epochs)) == (5, 2)
    assert 0 < timing.median < timing.total
