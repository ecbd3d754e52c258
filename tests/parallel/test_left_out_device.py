"""A model that was built on a device that does not train: weights are placed on the devices, and copied back.

``over_`` functions run as those of ``test_make_parallel.py``, in a process with 3 CPU devices.
"""

import keras
import numpy as np
import pytest

from choros import parallel

TORCH = keras.backend.backend() == "torch"


def scope(name="cpu:0"):
    """Return the scope of keras_experiments' scripts: ``tf.device('/cpu:0')``, or Keras' own."""
    if keras.backend.backend() != "tensorflow":
        return keras.device(name)
    import tensorflow as tf

    return tf.device("/cpu:0")


class Change(keras.callbacks.Callback):
    """Changes the rate and the weights after the first epoch, and notes the weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.get_weights())
        if epoch == 0:
            self.model.optimizer.learning_rate = 0.02
            self.model.set_weights([0.9 * array for array in self.model.get_weights()])


def pair(lab, name="cpu:0"):
    plain = lab.make(optimizer=keras.optimizers.Adam(0.05))
    with scope(name):
        serial = lab.make(optimizer=keras.optimizers.Adam(0.05))
    return plain, serial, parallel.make_parallel(serial, ["cpu:1", "cpu:2"])


def over_three_a_model_on_another_device_trains_as_one(lab):
    plain, serial, model = pair(lab)
    changes = [Change(), Change()]
    for _ in range(2):
        for each, change in zip((plain, model), changes, strict=True):
            each.fit(lab.X, lab.Y, callbacks=[change], **lab.HOW, **lab.CHECKED)
        lab.same(model, plain)
        serial.set_weights([0.8 * array for array in serial.get_weights()])  # the next fit takes them
        plain.set_weights([0.8 * array for array in plain.get_weights()])
    for ours, expected in zip(*(change.seen for change in changes), strict=True):
        lab.near(ours, expected)
    lab.near(*(each.train_on_batch(lab.X[:13], lab.Y[:13]) for each in (model, plain)))
    lab.near(*(each.evaluate(lab.X, lab.Y, batch_size=7, verbose=0) for each in (model, plain)))
    lab.near(*(each.predict(lab.X, batch_size=7, verbose=0) for each in (model, plain)))
    lab.same(model, plain)


def over_three_the_model_stays_where_it_was_built(lab):
    # On PyTorch plain Keras cannot train a model of "cpu:0": it finds no gradients.
    _, serial, model = pair(lab, "cpu" if TORCH else "cpu:0")
    model.fit(lab.X, lab.Y, **lab.HOW)
    assert {held.devices for held in model.placement(lab.X, lab.Y).variables} == {("cpu:1", "cpu:2")}
    lab.near(serial.predict(lab.X, verbose=0), model.predict(lab.X, verbose=0))
    lab.near(serial.evaluate(lab.X, lab.Y, verbose=0), model.evaluate(lab.X, lab.Y))
    model.save("model.keras")
    reloaded = keras.saving.load_model("model.keras")
    assert all(map(np.array_equal, reloaded.get_weights(), serial.get_weights()))
    before = serial.get_weights()
    serial.fit(lab.X, lab.Y, **lab.HOW)  # plain Keras goes on with it
    assert not any(map(np.array_equal, before, serial.get_weights()))


CASES = [name for name in list(globals()) if name.startswith("over_three_")]


@pytest.mark.parametrize("case", CASES)
def test_a_device_that_is_left_out(over_three, case):
    assert case not in (raised := over_three(*CASES)), raised[case]
