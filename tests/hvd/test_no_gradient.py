"""A variable without a gradient under ``DistributedOptimizer`` ends as in one process."""

import pytest


@pytest.mark.parametrize("launcher", ["choros run"])
def test_an_unused_head_ends_as_in_one_process(run):
    script = """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 2)).astype("float32")

    def train(wrap, rows, batch):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5)(inputs)
        model = keras.Model(inputs, {"a": keras.layers.Dense(2)(hidden), "b": keras.layers.Dense(2)(hidden)})
        model.compile(wrap(keras.optimizers.AdamW(0.01, weight_decay=0.1)), {"a": "mse"})
        model.fit(x[rows], {"a": y[rows]}, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.variables]

    mine = np.concatenate([np.arange(at + 4 * rank, at + 4 * rank + 4) for at in range(0, 24, 8)])
    one, shared = train(lambda optimizer: optimizer, np.arange(24), 8), train(hvd.DistributedOptimizer, mine, 4)
    said["far"] = max(float(np.abs(a - b).max()) for a, b in zip(one, shared))
    """
    for rank in run(2, script):
        assert rank["far"] <= 1e-6
