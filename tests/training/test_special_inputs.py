"""Text, sparse and ragged inputs: trained as plain Keras trains them, or refused by name before a worker starts."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from scipy import sparse

import choros

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
L = keras.layers
ROWS = 21  # the last batch of 8 has 5 rows, which two workers share unevenly
WORDS = ["a b c", "b b", "", "c", "a a é", "b"]
only_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="Keras takes these inputs on TensorFlow only")


def labels():
    return np.arange(ROWS) % 2


def texts():
    return [WORDS[(7 * i) % 6] for i in range(ROWS)]


def matrix():
    dense = sparse.random(ROWS, 40, 0.2, random_state=0).toarray()
    dense[3] = 0  # a row without entries
    return sparse.csr_matrix(dense)


def ragged():
    import tensorflow as tf

    lists = [[(i + j) % 10 for j in range(1 + (5 * i) % 7)] for i in range(ROWS)]
    return tf.ragged.constant(lists, dtype="int32")


def text_model():
    text = L.TextVectorization(max_tokens=10, output_sequence_length=4)
    text.adapt(WORDS)
    return keras.Sequential(
        [keras.Input((), dtype="string"), text, L.Embedding(10, 4), L.Flatten(), L.Dense(2, "softmax")]
    )


def wide_model():
    return keras.Sequential([keras.Input((40,)), L.Dense(4, "relu"), L.Dense(2, "softmax")])


def ragged_model():
    inputs = keras.Input((None,), dtype="int32", ragged=True)
    pooled = L.GlobalAveragePooling1D()(L.Embedding(10, 4)(inputs))
    return keras.Model(inputs, L.Dense(2, "softmax")(pooled))


class Batches(keras.utils.PyDataset):
    """Batches of 8 rows of anything that can be sliced."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return -(-ROWS // 8)

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], labels()[rows]


def compiled(make):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def check(make, x, pools, plain=None, given=None, **how):
    """A fit by two workers gives the weights, metrics and validation of plain ``fit``."""
    y = () if given is not None else (labels(),)
    ours, reference = compiled(make), compiled(make)
    plain = x if plain is None else plain
    expected = reference.fit(plain, labels(), batch_size=8, epochs=2, shuffle=False, verbose=0, **how)
    trainer = choros.Trainer(ours, "allreduce", workers=2, pool=pools(2))
    history = trainer.fit(x if given is None else given, *y, batch_size=8, epochs=2, shuffle=False, verbose=0, **how)
    for ours_now, theirs_now in zip(ours.get_weights(), reference.get_weights(), strict=True):
        if ours_now.dtype.kind == "f":
            np.testing.assert_allclose(ours_now, theirs_now, atol=1e-5)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=1e-5)
    return ours


@only_tensorflow
@pytest.mark.parametrize("kind", [object, str, "bytes"])
def test_text_of_each_dtype(kind, pools):
    x = np.array([text.encode() for text in texts()]) if kind == "bytes" else np.array(texts(), dtype=kind)
    objects = np.array(texts(), dtype=object)
    check(text_model, x, pools, plain=objects)


@only_tensorflow
def test_text_as_a_tensor_in_batches_and_in_validation(pools):
    import tensorflow as tf

    objects = np.array(texts(), dtype=object)
    check(text_model, tf.constant(texts()), pools, validation_data=(objects, labels()))
    check(text_model, objects, pools, given=Batches(objects))
    stream = tf.data.Dataset.from_tensor_slices((texts(), labels())).batch(8)
    check(text_model, objects, pools, given=stream)


@only_tensorflow
def test_words_weighted_by_their_frequency(pools):
    def make():
        text = L.TextVectorization(max_tokens=10, output_mode="tf_idf")
        text.adapt(WORDS)
        return keras.Sequential([keras.Input((), dtype="string"), text, L.Dense(2, "softmax")])

    check(make, np.array(texts(), dtype=object), pools)


@only_tensorflow
def test_text_beside_numbers_with_shuffled_rows_and_asynchronous_workers(pools):
    def make():
        text, numbers = keras.Input((1,), dtype="string", name="word"), keras.Input((3,), name="number")
        result = L.Flatten()(L.Embedding(4, 2)(L.StringLookup(vocabulary=["a", "b"])(text)))
        return keras.Model({"word": text, "number": numbers}, L.Dense(2, "softmax")(L.Concatenate()([result, numbers])))

    numbers = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    text = np.array([["a", "b", "c"][i % 3] for i in range(ROWS)], dtype=object)[:, None]
    x = {"word": text, "number": numbers}
    for rule in ("allreduce", choros.DOWNPOUR(window=2)):
        model = compiled(make)
        before = model.get_weights()
        trainer = choros.Trainer(model, rule, workers=2, pool=pools(2))
        history = trainer.fit(x, labels(), batch_size=8, epochs=3, validation_split=0.3, verbose=0)
        assert np.isfinite(history.history["val_loss"]).all()
        assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.skipif(ON_TENSORFLOW, reason="TensorFlow takes text")
@pytest.mark.parametrize("kind", [str, object, "bytes"])
def test_text_is_refused_with_the_backend_that_takes_it(kind):
    x = np.array([text.encode() for text in texts()]) if kind == "bytes" else np.array(texts(), dtype=kind)
    with pytest.raises(choros.errors.InvalidDataError, match=r"x holds text, which Keras takes on the TensorFlow"):
        choros.Trainer(compiled(wide_model), workers=2).fit(x, labels(), verbose=0)


def test_objects_and_labels_of_text_are_refused():
    trainer = choros.Trainer(compiled(wide_model), workers=2)
    with pytest.raises(choros.errors.InvalidDataError, match="y holds text: give numbers"):
        trainer.fit(matrix(), np.array(texts()), verbose=0)
    with pytest.raises(choros.errors.InvalidDataError, match="x holds object values"):
        trainer.fit(np.array([None] * ROWS), labels(), verbose=0)


@pytest.mark.parametrize("form", ["csr", "coo", "csc"])
def test_a_sparse_matrix(form, pools):
    check(wide_model, matrix().asformat(form), pools, plain=matrix().toarray())


def test_a_sparse_matrix_in_batches_and_in_validation(pools):
    dense = matrix().toarray()
    check(wide_model, matrix(), pools, plain=dense, validation_data=(dense, labels()))
    check(wide_model, dense, pools, given=Batches(matrix()))
    stream = [(matrix()[start : start + 8], labels()[start : start + 8]) for start in range(0, ROWS, 8)]
    check(wide_model, dense, pools, given=iter(2 * stream), steps_per_epoch=3)


def test_a_sparse_matrix_with_shuffled_rows_equals_the_dense_one(pools):
    weights = []
    for x in (matrix(), matrix().toarray()):
        model = compiled(wide_model)
        trainer = choros.Trainer(model, "allreduce", workers=2, pool=pools(2))
        trainer.fit(x, labels(), batch_size=8, epochs=3, validation_split=0.3, seed=4, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras takes sparse=True on JAX and TensorFlow only")
def test_a_sparse_matrix_of_the_backend_in_a_model_with_sparse_inputs(pools):
    def make():
        return keras.Sequential([keras.Input((40,), sparse=True), L.Dense(4, "relu"), L.Dense(2, "softmax")])

    dense = matrix().toarray().astype("float32")
    if ON_TENSORFLOW:
        import tensorflow as tf

        trained = tf.sparse.from_dense(dense)
    else:
        from jax.experimental.sparse import BCOO

        trained = BCOO.fromdense(dense, nse=int(np.count_nonzero(dense)) + 5)  # padded by places outside of the matrix
    check(make, trained, pools, plain=matrix())


@only_tensorflow
def test_ragged_rows(pools):
    import tensorflow as tf

    x = ragged()
    check(ragged_model, x, pools, validation_data=(x, labels()))
    check(ragged_model, x, pools, given=Batches(x))
    stream = tf.data.Dataset.from_tensor_slices((x, labels())).batch(8)
    check(ragged_model, x, pools, given=stream)


@only_tensorflow
def test_what_has_more_ragged_axes_is_refused():
    import tensorflow as tf

    deep = tf.ragged.constant([[[1], [2, 3]], [[4]]])
    with pytest.raises(choros.errors.InvalidDataError, match=r"2 ragged axes: .*to_tensor"):
        choros.Trainer(compiled(ragged_model), workers=2).fit(deep, np.zeros(2), verbose=0)


SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
import keras, numpy as np
import choros
from tests.training.test_special_inputs import ON_TENSORFLOW, compiled, labels, matrix, ragged, ragged_model, texts
from tests.training.test_special_inputs import text_model, wide_model

made = [(wide_model, matrix())]
if ON_TENSORFLOW:
    made += [(text_model, np.array(texts())), (ragged_model, ragged())]
for make, x in made:
    model = compiled(make)
    choros.Trainer(model).fit(x, labels(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    if os.environ["CHOROS_RANK"] == "0":
        with open({out!r}, "a") as file:
            print(json.dumps([float(np.abs(w).sum()) for w in model.get_weights() if w.dtype.kind == "f"]), file=file)
"""


def test_under_choros_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2]), out=str(tmp_path / "sums")))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sums = [json.loads(line) for line in (tmp_path / "sums").read_text().splitlines()]
    made = [(wide_model, matrix().toarray())]
    if ON_TENSORFLOW:
        made += [(text_model, np.array(texts(), object)), (ragged_model, ragged())]
    for (make, x), total in zip(made, sums, strict=True):
        plain = compiled(make)
        plain.fit(x, labels(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        expected = [float(np.abs(weight).sum()) for weight in plain.get_weights() if weight.dtype.kind == "f"]
        np.testing.assert_allclose(total, expected, atol=1e-4)


@only_tensorflow
def test_by_ranks_of_a_launcher():
    made = [(wide_model, matrix(), matrix().toarray())]
    made += [(text_model, np.array(texts()), np.array(texts(), object)), (ragged_model, ragged(), ragged())]
    for make, x, plain_x in made:
        ours, expected = compiled(make), compiled(make)
        expected.fit(plain_x, labels(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        trainer = choros.Trainer(ours, workers=2, launcher=choros.Ssh("localhost:2"), timeout=60, first_timeout=120)
        trainer.fit(x, labels(), batch_size=8, epochs=2, shuffle=False, verbose=0)
        for a, b in zip(ours.get_weights(), expected.get_weights(), strict=True):
            if a.dtype.kind == "f":
                np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
@only_tensorflow
def test_choros_check_compares_them():
    for make, x in ((wide_model, matrix()), (text_model, np.array(texts())), (ragged_model, ragged())):
        result = choros.check(compiled(make), x, labels(), batch_size=8)
        assert result.passed, str(result)
