"""The input pipeline of Keras' loop on TensorFlow while ranks wait for each other."""

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="KERAS_BACKEND names another backend")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((4, 3), "float32"), np.ones(4)


class Options(keras.callbacks.Callback):
    """Notes how the pipelines are made while ``fit`` runs."""

    def on_epoch_begin(self, epoch, logs=None):
        self.seen = tuned()


def tuned():
    """Return whether Keras' pipelines of arrays and of a PyDataset are autotuned; None if that is not set."""
    from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter

    made = (
        array_data_adapter.ArrayDataAdapter(np.ones((4, 3)), np.ones(4), batch_size=2),
        py_dataset_adapter.PyDatasetAdapter(Rows(), class_weight=None),
    )
    return [adapter.get_tf_dataset().options().autotune.enabled for adapter in made]


def test_keras_pipelines_are_not_tuned_during_fit_and_are_as_before_after_it():
    from choros.hvd.fit_patch import pipelines

    assert tuned() == [None, None]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    options = Options()
    with pipelines():
        model.fit(Rows(), callbacks=[options], epochs=2, verbose=0)
    assert options.seen == [False, False]
    assert tuned() == [None, None]
