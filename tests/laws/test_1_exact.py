"""Law 1: by AllReduce, k workers are one process on the same global batches."""

import inspect
import json
import os
import sys
import warnings

import keras
import numpy as np
import pytest

import choros
from choros.data import make_source

WORKERS = (2, 3, 5) if os.environ["KERAS_BACKEND"] == "jax" else (2, 3)
LOOSE = ("auc",)


def check(reference, model, expected, result, same_weights):
    same_weights(reference, model, 1e-5)
    assert list(result) == list(expected)
    for name in expected:
        tolerance = 1e-4 if any(word in name for word in LOOSE) else 2e-6
        np.testing.assert_allclose(result[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("workers", WORKERS)
def test_adam_l2_metrics_validation_and_a_last_batch_smaller_than_the_workers(
    train_both, make_mlp, data, same_weights, workers
):
    x, y = data(rows=99)  # batches of 16: the last has 3 rows
    valid = data(rows=33, seed=1)
    make = lambda: make_mlp(l2=1e-2)
    check(*train_both(make, x, y, workers, validation_data=valid), same_weights)


@pytest.mark.parametrize("workers", WORKERS)
def test_sample_weights_auc_and_weighted_metrics(train_both, make_mlp, data, same_weights, workers):
    x, y = data(rows=103, classes=2)
    y = y.reshape(-1, 1)
    weights = np.random.default_rng(2).uniform(0.1, 3, 103).astype("float32")
    make = lambda: make_mlp(classes=1, metrics=["accuracy", keras.metrics.AUC(name="auc")], weighted_metrics=["mse"])
    check(*train_both(make, x, y, workers, sample_weight=weights), same_weights)


@pytest.mark.parametrize("workers", WORKERS)
def test_class_weights_and_sgd_with_clipnorm(train_both, make_mlp, data, same_weights, workers):
    x, y = data(rows=70)
    make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.3))
    weights = {0: 1.0, 1: 0.5, 2: 2.0}
    check(*train_both(make, x, y, workers, class_weight=weights), same_weights)


@pytest.mark.parametrize("workers", (2, 3))
def test_several_inputs_and_outputs(train_both, data, same_weights, workers):
    x, y = data(rows=75)

    def make():
        keras.utils.set_random_seed(3)
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        hidden = keras.layers.Dense(12, "tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile(
            keras.optimizers.Adam(1e-2),
            {"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        )
        return model

    inputs = {"left": x[:, :4], "right": x[:, 4:]}
    targets = {"kind": y, "size": x.sum(1, keepdims=True)}
    check(*train_both(make, inputs, targets, workers), same_weights)


@pytest.mark.parametrize("workers", (2, 3))
def test_masks(train_both, same_weights, workers, backend):
    rng = np.random.default_rng(4)
    x = rng.integers(1, 20, (61, 7))
    for row, length in enumerate(rng.integers(1, 8, 61)):
        x[row, length:] = 0
    y = rng.integers(0, 4, (61, 7))

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(4, "softmax"),
            ]
        )
        # TensorFlow's Adam treats rows of an Embedding that repeat in a batch in its own, sparse way
        optimizer = keras.optimizers.SGD(0.5) if backend == "tensorflow" else keras.optimizers.Adam(1e-2)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    check(
        *train_both(make, x, y, workers, validation_data=(x[:20], y[:20]), validation_batch_size=8),
        same_weights,
    )


@pytest.mark.parametrize("reduction", ("mean_with_sample_weight", "sum"))
def test_other_reductions(train_both, make_mlp, data, same_weights, reduction):
    x, y = data(rows=70)
    weights = np.random.default_rng(2).uniform(0.1, 3, 70).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy
    make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.01), loss=loss(reduction=reduction))
    check(*train_both(make, x, y, 2, sample_weight=weights), same_weights)


def test_what_cannot_be_exact_is_refused_by_name(make_mlp, data, pools):
    x, y = data(rows=70)
    model = make_mlp(loss=keras.losses.SparseCategoricalCrossentropy(reduction="none"))
    with pytest.raises(choros.errors.InexactLossError, match="reduction"):
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, verbose=0)


def test_a_custom_train_step(train_both, data, same_weights, backend):
    x, y = data(rows=70)
    check(*train_both(lambda: custom(backend), x, y, 2), same_weights)


def custom(backend):
    """A model whose train_step is its user's own: it trains on inputs scaled by two."""

    class Scaled(keras.Sequential):
        if backend == "jax":

            def train_step(self, state, data):
                x, y = data
                return super().train_step(state, (x * 2.0, y))
        else:

            def train_step(self, data):
                x, y = data
                return super().train_step((x * 2.0, y))

    keras.utils.set_random_seed(0)
    model = Scaled([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
def test_mixed_precision_ends_bit_equal_and_near_one_process(train_both, make_mlp, data, same_weights, policy):
    x, y = data(rows=70)
    keras.config.set_dtype_policy(policy)
    try:
        make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.05))
        reference, model, _, _ = train_both(make, x, y, 2)
    finally:
        keras.config.set_dtype_policy("float32")
    same_weights(reference, model, 2e-2)  # the two halves of a batch are rounded apart


def wide(keras):
    """A classifier of more than 16 KB, so that its gradients go by the library; weights depend only on the seed."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1000, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


CARRIED = """
import os, sys
library, room = os.environ["CHOROS_COMM"], sys.argv[1]
import choros, choros.native
if library == "jax":
    choros.native.initialize("jax")
import json, keras, numpy as np
from choros.cluster import Place
{wide}
data, said = np.load(os.path.join(room, "data.npz")), []
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
    model = wide(keras)
    history = choros.Trainer(model, algorithm).fit(
        data["x"], data["y"], epochs=2, batch_size=16, seed=5, verbose=0, validation_data=(data["x"], data["y"]))
    said.append([history.run.group, history.run.summary(), [float(np.abs(w).sum()) for w in model.get_weights()]])
    if isinstance(algorithm, choros.AllReduce):
        np.savez(os.path.join(room, f"rank{{Place.here().rank}}.npz"), *model.get_weights())
with open(os.path.join(room, f"rank{{Place.here().rank}}.json"), "w") as file:
    json.dump(said, file)
"""


@pytest.mark.parametrize("launcher", ["choros run", pytest.param("mpiexec", marks=pytest.mark.long)])
def test_sums_by_the_backends_own_library(plain_fit, data, clean_python, backend, request, tmp_path, launcher):
    """PyTorch's on PyTorch and TensorFlow, JAX's on JAX; what meets alone uses the group beneath, and says so."""
    library = "jax" if backend == "jax" else "torch"
    x, y = data(rows=99)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    reference = wide(keras)
    plain_fit(reference, x, y, epochs=2, batch_size=16, seed=5)
    script = CARRIED.format(wide=inspect.getsource(wide))
    if launcher == "mpiexec":
        (tmp_path / "carried.py").write_text(script)
        mpiexec = request.getfixturevalue("mpiexec")
        mpiexec(2, sys.executable, tmp_path / "carried.py", tmp_path, timeout=200, CHOROS_COMM=library)
    else:
        more = {"CHOROS_COMM": library, "CHOROS_ROOM": str(tmp_path)}
        script = script.replace("sys.argv[1]", 'os.environ["CHOROS_ROOM"]')
        done = clean_python(script, before=("-m", "choros", "run", "-n", "2"), timeout=200, **more)
        assert done.returncode == 0, done.stdout + done.stderr
    beneath = "MPI" if launcher == "mpiexec" else "shared memory"
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, result in enumerate(both):
        groups = [group for group, _, _ in result]
        assert groups == [f"{library} (gloo) over {beneath}", "a center in shared memory"]
        assert all(f"exchange by {group}" in line for group, line, _ in result)
        with np.load(tmp_path / f"rank{rank}.npz") as raised:
            for name, expected in zip(raised.files, reference.get_weights(), strict=True):
                np.testing.assert_allclose(raised[name], expected, rtol=0, atol=1e-5)
    assert [weights for _, _, weights in both[0]] == [weights for _, _, weights in both[1]]


def test_batches_are_shuffled_whole_and_their_rows_stay_in_order(train_both, make_mlp, data, same_weights):
    x, y = data(rows=70)
    reference, model, expected, result = train_both(make_mlp, x, y, 2, shuffle="batch")
    same_weights(reference, model, 1e-5)
    np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
    source = make_source(np.arange(70))
    orders = []
    for epoch in range(2):
        how = dict(rank=0, size=1, synchronous=True, batch_size=16, seed=5, epoch=epoch, shuffle="batch")
        batches = [batch.x.tolist() for batch in source.epoch(**how)]
        assert batches[-1] == list(range(64, 70))  # the smaller one stays the last, as in Keras
        assert all(batch == list(range(batch[0], batch[0] + 16)) for batch in batches[:-1])
        orders.append([batch[0] for batch in batches[:-1]])
        assert sorted(orders[-1]) == [0, 16, 32, 48]
    assert orders[0] != orders[1]


@pytest.mark.skipif(os.environ["KERAS_BACKEND"] != "tensorflow", reason="of Keras' sparse gradients on TensorFlow")
@pytest.mark.parametrize(("optimizer", "warned"), [("rmsprop", True), ("sgd", False)])
def test_gradients_of_an_embedding_that_keras_treats_sparsely_are_warned_about(optimizer, warned, pools):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    x = np.arange(24).reshape(8, 3) % 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, np.ones((8, 1)), batch_size=4, epochs=1, verbose=0)
    assert any("Embedding" in str(each.message) for each in caught) == warned
