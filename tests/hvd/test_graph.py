"""Collectives with gradients, inside compiled functions, and batch normalisation over all ranks."""


def test_gradients_eager_and_compiled(run):
    script = """
    name = keras.backend.backend()

    def with_gradient(function, x, compiled):
        if name == "torch":
            import torch
            x = torch.tensor(x, requires_grad=True)
            out = function(x)
            (out * (rank + 1)).sum().backward()
            return numbers(out.detach()), numbers(x.grad)
        if name == "tensorflow":
            import tensorflow as tf
            x = tf.constant(x)
            def both(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    out = function(x)
                    loss = tf.reduce_sum(out * (rank + 1))
                return out, tape.gradient(loss, x)
            out, grad = (tf.function(both) if compiled else both)(x)
            return numbers(out), numbers(grad)
        import jax
        def loss(x):
            out = function(x)
            return (out * (rank + 1)).sum(), out
        both = jax.value_and_grad(loss, has_aux=True)
        (_, out), grad = (jax.jit(both) if compiled else both)(jax.numpy.asarray(x))
        return numbers(out), numbers(grad)

    x = np.arange(6, dtype="float32").reshape(3, 2) + 10 * rank
    ways = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum, name="a"),
        "average": lambda x: hvd.allreduce(x, name="b"),
        "gather": lambda x: hvd.allgather(x, name="c"),
        "uneven": lambda x: hvd.allgather(x[: rank + 1], name="d"),
        "root": lambda x: hvd.broadcast(x, 1, name="e"),
        "scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="f"),
        "all": lambda x: hvd.alltoall(x, splits=[1, 2], name="g")[0],
        "counts": lambda x: 0 * x[0, 0] + keras.ops.cast(hvd.alltoall(x, [rank, 3 - rank], name="h")[1], "float32"),
        "halves": lambda x: hvd.alltoall(x[:2], name="i"),
    }
    for way, function in ways.items():
        for compiled in (False, True):
            said[f"{way} {compiled}"] = with_gradient(function, x, compiled)
    """
    first, second = run(2, script)
    a, b = [[0, 1], [2, 3], [4, 5]], [[10, 11], [12, 13], [14, 15]]
    three = [[3.0, 3.0]] * 3  # what both ranks' losses, weighted 1 and 2, ask for
    total = [[p + q for p, q in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]
    for compiled in (False, True):
        for result in (first, second):
            assert result[f"sum {compiled}"] == [total, three]
            assert result[f"average {compiled}"] == [[[v / 2 for v in r] for r in total], [[1.5, 1.5]] * 3]
            assert result[f"gather {compiled}"] == [a + b, three]
            assert result[f"root {compiled}"][0] == b
        assert first[f"uneven {compiled}"] == [a[:1] + b[:2], [[3, 3], [0, 0], [0, 0]]]
        assert second[f"uneven {compiled}"] == [a[:1] + b[:2], [[3, 3], [3, 3], [0, 0]]]
        assert first[f"root {compiled}"][1] == [[0, 0]] * 3
        assert second[f"root {compiled}"][1] == three
        assert first[f"scatter {compiled}"] == [total[:2], [[1, 1], [1, 1], [2, 2]]]
        assert second[f"scatter {compiled}"] == [total[2:], [[1, 1], [1, 1], [2, 2]]]
        assert first[f"counts {compiled}"][0] == [0, 1]
        assert second[f"counts {compiled}"][0] == [3, 2]
        assert first[f"halves {compiled}"] == [[a[0], b[0]], [[1, 1], [2, 2], [0, 0]]]
        assert second[f"halves {compiled}"] == [[a[1], b[1]], [[1, 1], [2, 2], [0, 0]]]
        assert first[f"all {compiled}"] == [[a[0], b[0]], [[1, 1], [2, 2], [2, 2]]]
        assert second[f"all {compiled}"] == [[*a[1:], *b[1:]], [[1, 1], [2, 2], [2, 2]]]


def test_batch_normalisation_over_all_ranks(run):
    """Equal to one process on all rows, in ``fit``'s step, with unequal batches, a large mean and a mask."""
    script = """
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(40, 5, 6)) + 300).astype("float32")
    y = rng.normal(size=(40, 5, 1)).astype("float32")
    x[3, 2:] = x[30, 4:] = 0
    mine = [slice(0, 24), slice(24, 40)][rank]

    def make(layer, optimizer, masked):
        keras.utils.set_random_seed(1)
        masking = [keras.layers.Masking()] if masked else []
        layers = [keras.Input((5, 6)), *masking, layer(momentum=0.5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(optimizer, loss)
        return model

    for masked in (False, True):
        summed = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), op=hvd.Sum)
        model = make(hvd.SyncBatchNormalization, summed, masked)
        one = make(keras.layers.BatchNormalization, keras.optimizers.SGD(1e-3), masked)
        for _ in range(3):
            model.train_on_batch(x[mine], y[mine])
            one.train_on_batch(x, y)
        pairs = zip(model.get_weights(), one.get_weights())
        said[f"far {masked}"] = max(float((np.abs(a - b) / np.maximum(1, np.abs(b))).max()) for a, b in pairs)
    path = os.path.join(os.environ["SAID"], f"{rank}.keras")
    model.save(path)
    plain = keras.models.load_model(path)
    said["plain"] = [type(layer) is keras.layers.BatchNormalization for layer in plain.layers]
    """
    for result in run(2, script):
        assert result["far False"] <= 1e-4
        assert result["far True"] <= 1e-4
        assert any(result["plain"])
