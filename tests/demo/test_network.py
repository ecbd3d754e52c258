import json

import numpy as np

from choros.tools.demo.network import build, restart


def test_it_is_dist_keras_network():
    model = build(30, 2, 0)
    layers = [(type(layer).__name__, getattr(layer, "units", None)) for layer in model.layers]
    assert layers == [("Dense", 600), ("Dropout", None), ("Dense", 600), ("Dense", 2)]
    assert [layer.activation.__name__ for layer in model.layers if hasattr(layer, "units")] == [
        "relu",
        "relu",
        "softmax",
    ]
    assert model.layers[1].rate == 0.2
    assert model.count_params() == 30 * 600 + 600 + 600 * 600 + 600 + 600 * 2 + 2
    assert json.dumps(model.get_compile_config())  # it can travel


def test_a_seed_gives_the_same_weights_and_another_gives_others():
    first, same, other = (build(8, 3, seed).get_weights() for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_kernels_are_glorots_and_biases_nothing():
    first, bias = build(8, 3, 0).get_weights()[:2]
    limit = np.sqrt(6 / 608)
    assert 0.99 * limit < np.abs(first).max() <= limit
    assert not bias.any()


def test_a_restarted_network_trains_as_a_new_one():
    rows, classes = np.random.default_rng(0).normal(size=(8, 8)).astype("float32"), np.arange(8) % 3
    trained, new = build(8, 3, 5), build(8, 3, 6)
    for layer in (trained.layers[1], new.layers[1]):
        layer.rate = 0.0
    for _ in range(2):
        trained.train_on_batch(rows, classes)
    restart(trained, 6)
    for _ in range(2):
        trained.train_on_batch(rows, classes)
        new.train_on_batch(rows, classes)
    variables = [model.weights + model.optimizer.variables for model in (trained, new)]
    for variable, expected in zip(*variables, strict=True):
        assert np.array_equal(variable.numpy(), expected.numpy()), variable.path
