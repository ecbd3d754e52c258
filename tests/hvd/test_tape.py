"""Horovod's gradient tape on TensorFlow; on the other backends an error that says what to do instead."""

import pytest

import choros.hvd as hvd


def test_gradients_are_reduced(run, backend):
    if backend != "tensorflow":
        hvd.init()
        with pytest.raises(ValueError, match=r"optimizer in hvd\.DistributedOptimizer"):
            hvd.DistributedGradientTape(None)
        hvd.shutdown()
        return
    script = """
    import tensorflow as tf

    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    table = keras.layers.Embedding(5, 2)
    table.build((None,))
    x = tf.random.stateless_normal((8, 3), seed=(1, rank))

    def gradients(kind, reduced):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        if kind == "part":
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[1]) if reduced else tape
        elif reduced:
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum if kind == "sum" else hvd.Average)
            assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    own = [numbers(g) for g in gradients("plain", False)]
    said["own"] = own
    said["average"] = [numbers(g) for g in gradients("average", True)]
    said["sum"] = [numbers(g) for g in tf.function(lambda: gradients("sum", True))()]
    said["part"] = [numbers(g) for g in gradients("part", True)]
    if rank:
        said["alone"] = [numbers(g) for g in gradients("average", True)]  # the other one has joined
    hvd.join()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table(tf.constant([rank, 4])))
    tape = hvd.DistributedGradientTape(tape)
    said["rows"] = numbers(tape.gradient(loss, table.embeddings.value))

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(x)
    tape = hvd.DistributedGradientTape(tape)
    zeros = tape.gradient(loss, [model.trainable_variables[0].value], None, tf.UnconnectedGradients.ZERO)
    said["unconnected"] = numbers(zeros[0])

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    sources = [v.value for v in model.trainable_variables]
    tape.register_local_source(sources[0])
    found = tape.gradient(loss, {"a": sources[0], "b": sources[1]})
    said["local"] = [numbers(found["a"]), numbers(found["b"])]
    """
    import numpy as np

    first, second = run(2, script)
    for i in range(4):
        mean = (np.array(first["own"][i]) + np.array(second["own"][i])) / 2
        for result in (first, second):
            assert np.allclose(result["average"][i], mean, rtol=1e-5)
            assert np.allclose(result["sum"][i], 2 * mean, rtol=1e-5)
            assert np.allclose(result["part"][i], mean if i < 2 else np.array(result["own"][i]) / 2, rtol=1e-5)
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(second["alone"], second["own"], strict=True))
    assert first["unconnected"] == [[0.0] * 4] * 3
    assert first["rows"] == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0], [1, 1]]
    for result in (first, second):
        assert np.allclose(result["local"][0], np.array(result["own"][0]) / 2, rtol=1e-5)
        assert np.allclose(result["local"][1], result["average"][1], rtol=1e-5)
