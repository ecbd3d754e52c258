"""Embedding layers for TensorBoard's projector."""

import keras
import numpy as np
import pytest

from choros.callbacks import TensorBoardEmbedding
from choros.errors import InvalidInputError


def model():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(5, 2, name="words")], name="inner")
    made = keras.Sequential([keras.Input((3,)), inner, keras.layers.Flatten(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def fit(made, callback, epochs=3):
    made.fit(np.ones((4, 3), "int32"), np.ones(4), epochs=epochs, verbose=0, callbacks=[callback])


def test_layers_inside_models_are_found_and_written(tmp_path):
    made, labels = model(), tmp_path / "labels.tsv"
    labels.write_text("a\nb\nc\nd\ne\n")
    fit(made, TensorBoardEmbedding(tmp_path / "logs", embeddings_metadata={"words": str(labels)}))
    written = np.loadtxt(tmp_path / "logs" / "words.tsv", delimiter="\t")
    weights = keras.ops.convert_to_numpy(made.get_layer("inner").get_layer("words").embeddings)
    np.testing.assert_allclose(written, weights, rtol=1e-5)
    configuration = (tmp_path / "logs" / "projector_config.pbtxt").read_text()
    assert 'tensor_path: "words.tsv"' in configuration
    assert 'metadata_path: "words-metadata.tsv"' in configuration
    assert (tmp_path / "logs" / "words-metadata.tsv").read_text() == labels.read_text()


def test_it_writes_every_so_many_epochs(tmp_path):
    fit(model(), TensorBoardEmbedding(tmp_path, embeddings_freq=4))
    assert not (tmp_path / "words.tsv").exists()


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(InvalidInputError, match="no Embedding layer 'verbs': there are 'words'"):
        fit(model(), TensorBoardEmbedding(tmp_path, embeddings_layer_names=["verbs"]))
    with pytest.raises(InvalidInputError, match="is not a file"):
        fit(model(), TensorBoardEmbedding(tmp_path, embeddings_metadata=str(tmp_path / "none.tsv")))
    with pytest.raises(InvalidInputError, match="embeddings_freq=0"):
        TensorBoardEmbedding(tmp_path, embeddings_freq=0)
