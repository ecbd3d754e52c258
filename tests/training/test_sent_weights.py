"""Workers copy the initial weights while the caller still writes them."""

import time

import keras
import numpy as np
import pytest

import choros
from choros.comm.shm.segment import Segment

SLOW = 0.3  # seconds before each variable is written


@pytest.fixture(scope="module")
def pool():
    with choros.WorkerPool(2, echo=False) as workers:
        yield workers


def model():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(4, "tanh") for _ in range(3))])
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return made


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(24, 3)).astype("float32"), random.normal(size=(24, 4)).astype("float32")


@pytest.fixture
def before_each(monkeypatch):
    """Return a function that installs a call before each array written to a segment: two of data, then weights."""

    def install(call):
        write = Segment.write

        def slow(self, array, offset=0):
            call()
            write(self, array, offset)

        monkeypatch.setattr(Segment, "write", slow)

    return install


@pytest.mark.parametrize("algorithm", ["allreduce", "adag"])
def test_workers_wait_for_weights_that_are_not_written_yet(pool, before_each, algorithm):
    x, y = data()
    fast, slow = model(), model()

    def train(actual):
        trainer = choros.Trainer(actual, algorithm, workers=1 if algorithm == "adag" else 2, pool=pool)
        trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return actual.get_weights()

    expected = train(fast)
    before_each(lambda: time.sleep(SLOW))
    for value, other in zip(train(slow), expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_an_interrupt_while_weights_are_written_leaves_the_model_as_it_was(before_each):
    x, y = data()
    trained, written = model(), []
    initial = trained.get_weights()

    def interrupt():
        written.append(1)
        if len(written) > 4:
            raise KeyboardInterrupt

    with choros.WorkerPool(2, echo=False) as pool:
        trainer = choros.Trainer(trained, "allreduce", workers=2, pool=pool)
        before_each(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(x, y, batch_size=8, verbose=0)
    assert len(written) == 5
    for value, other in zip(trained.get_weights(), initial, strict=True):
        np.testing.assert_array_equal(value, other)
