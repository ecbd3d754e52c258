"""``DistributedOptimizer`` against one process: in ``fit``, ``train_on_batch`` and loops of the user's own."""

import pytest

MODEL = """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(203, 6)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")
    w = rng.uniform(0.5, 2, 203).astype("float32")
    name = keras.backend.backend()
    SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam

    def make(optimizer, jit="auto", **how):
        keras.utils.set_random_seed(3)
        penalty = keras.regularizers.L2(1e-3)
        layers = [keras.Input((6,)), keras.layers.Dense(16, "relu", kernel_regularizer=penalty)]
        model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
        how = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"], **how}
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=jit, **how)
        return model

    def far(a, b):
        return max(float(np.abs(p - q).max()) for p, q in zip(a.get_weights(), b.get_weights()))

    def wrong(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def trained(run):
    def start(size, script):
        return run(size, MODEL + script)

    return start


@pytest.mark.parametrize(("launcher", "size"), [("any", 2), ("choros run", 3)])
def test_fit_equals_one_process(trained, size, backend):
    """Weights, metrics and History, with rows that do not divide, for SGD, Adam and averages of the weights."""
    if size == 2 and backend != "jax":
        pytest.skip("how many ranks divide the rows is the same on every backend: three are enough")
    script = """
    import choros

    kinds = {
        "SGD": lambda: SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
        "EMA": lambda: Adam(1e-2, use_ema=True, ema_overwrite_frequency=7),
        "added": lambda: SGD(0.1, gradient_accumulation_steps=2),
        "Adam": lambda: Adam(1e-2),
    }
    for kind, optimizer in kinds.items():
        model = make(hvd.DistributedOptimizer(optimizer()))
        if rank:
            model.set_weights([v + 1 for v in model.get_weights()])
        history = model.fit(
            hvd.shard(x, y, w, per_rank_batch_size=48 // size, seed=5), epochs=3, verbose=0,
            validation_data=hvd.shard(x[:51], y[:51], per_rank_batch_size=8, training=False),
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        ).history
        one, expected = make(optimizer()), None
        if not rank:  # one process for all of them
            expected = one.fit(
                choros.shard(x, y, w, global_batch_size=48, place=choros.Place(), seed=5),
                epochs=3, verbose=0, shuffle=False,
                validation_data=(x[:51], y[:51]),
            ).history
        expected, weights = hvd.broadcast_object([expected, one.get_weights()])
        one.set_weights(weights)
        same = set(history) == set(expected)
        off = max(abs(a - b) for key in expected for a, b in zip(history[key], expected[key]))
        said[kind] = [far(model, one), same, off]
    mine, its = model.optimizer, one.optimizer
    own = {**mine.get_config(), "name": its.name}
    said["told"] = type(mine) is type(its), own == its.get_config()
    model.save(os.environ["SAID"] + f"/model{rank}.keras")
    model.save(os.environ["SAID"] + f"/model{rank}.h5")
    loaded = [hvd.load_model(os.environ["SAID"] + f"/model{rank}.{kind}") for kind in ("keras", "h5")]
    for again in loaded:
        said.setdefault("slots", []).append([
            far(model, again), len(again.optimizer.variables) == len(model.optimizer.variables),
            max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in
                zip(map(numbers, again.optimizer.variables), map(numbers, model.optimizer.variables))),
            "already" in wrong(lambda: hvd.DistributedOptimizer(again.optimizer)),
        ])
    """
    results = trained(size, script)
    for result in results:
        assert result["SGD"][0] <= 1e-6
        for kind in ("SGD", "Adam", "EMA", "added"):
            weights, same, metrics = result[kind]
            assert weights <= 1e-5, (kind, result)
            assert same
            assert metrics <= 2e-6, (kind, result)
        assert result["told"] == [True, True]
        assert result["slots"] == [[0, True, 0, True]] * 2


def test_ways_to_step(trained):
    """``train_on_batch``, loops with ``apply``, compiled ones, added passes, sums, local layers, half precision."""
    script = """
    half = [slice(0, 40), slice(40, 80)][rank]
    both = slice(0, 80)

    def on_batch(optimizer, rows, steps=3, **how):
        model = make(optimizer, **how)
        for _ in range(steps):
            model.train_on_batch(x[rows], y[rows])
        return model

    # the same through fit's own step, with and without XLA
    for jit in (True, False) if name == "tensorflow" else ("auto",):  # JAX' eager steps are below
        said[f"train_on_batch {jit}"] = far(
            on_batch(hvd.DistributedOptimizer(Adam(0.01)), half, jit=jit), on_batch(Adam(0.01), both, jit=jit)
        )

    # several steps a call, eager steps, and losses that compile scales by itself under mixed precision
    for how in ({"run_eagerly": True}, {"steps_per_execution": 2} if name != "torch" else {}):
        wrapped, plain = make(hvd.DistributedOptimizer(SGD(0.1)), **how), make(SGD(0.1))
        wrapped.fit(x[half], y[half], batch_size=8, verbose=0, shuffle=False)
        order = np.concatenate([np.r_[i : i + 8, i + 40 : i + 48] for i in range(0, 40, 8)])
        plain.fit(x[order], y[order], batch_size=16, verbose=0, shuffle=False)
        said[f"fit {sorted(how)}"] = far(wrapped, plain)
    keras.config.set_dtype_policy("mixed_float16")
    mixed, one = make(hvd.DistributedOptimizer(SGD(0.1))), make(SGD(0.1))
    keras.config.set_dtype_policy("float32")
    mixed.fit(x[half], y[half], batch_size=8, verbose=0, shuffle=False)
    one.fit(x[order], y[order], batch_size=16, verbose=0, shuffle=False)
    said["mixed"] = [far(mixed, one), type(mixed.optimizer).__name__]

    def gradients(model, rows):
        function = keras.losses.SparseCategoricalCrossentropy()
        if name == "tensorflow":
            import tensorflow as tf
            with tf.GradientTape() as tape:
                loss = function(y[rows], model(x[rows]))
            return tape.gradient(loss, model.trainable_variables)
        if name == "torch":
            model.zero_grad()
            function(keras.ops.convert_to_tensor(y[rows]), model(x[rows])).backward()
            return [v.value.grad for v in model.trainable_variables]
        import jax
        def loss(trained):
            out, _ = model.stateless_call(trained, [v.value for v in model.non_trainable_variables], x[rows])
            return function(y[rows], out)
        return jax.grad(loss)([v.value for v in model.trainable_variables])

    def own_loop(optimizer, rows, steps=4):
        model = make(optimizer)
        for _ in range(steps):
            optimizer.apply(gradients(model, rows), model.trainable_variables)
        return model

    def compiled_loop(optimizer, rows, steps=4):
        if name == "torch":
            return own_loop(optimizer, rows, steps)
        model = make(optimizer)
        optimizer.build(model.trainable_variables)
        if name == "tensorflow":
            import tensorflow as tf
            @tf.function
            def step():
                optimizer.apply(gradients(model, rows), model.trainable_variables)
            for _ in range(steps):
                step()
            return model
        import jax
        function = keras.losses.SparseCategoricalCrossentropy()
        def loss(trained):
            return function(y[rows], model.stateless_call(trained, [], x[rows])[0])
        @jax.jit
        def step(trained, slots):
            return optimizer.stateless_apply(slots, jax.grad(loss)(trained), trained)
        trained, slots = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
        for _ in range(steps):
            trained, slots = step(trained, slots)
        for v, value in zip([*model.trainable_variables, *optimizer.variables], [*trained, *slots]):
            v.assign(value)
        return model

    said["own loop"] = far(own_loop(hvd.DistributedOptimizer(SGD(0.1)), half), own_loop(SGD(0.1), both))
    said["compiled loop"] = far(compiled_loop(hvd.DistributedOptimizer(SGD(0.1)), half), own_loop(SGD(0.1), both))

    # a rank without more data joins: the others' gradients go on alone, in loops and in compiled ones
    for way, go in {"own": own_loop, "compiled": compiled_loop}.items():
        model = go(hvd.DistributedOptimizer(SGD(0.1)), half, steps=2 + 2 * (rank == 1))
        last = hvd.join()
        expected = own_loop(SGD(0.1), both, steps=2)
        if rank == 1:
            for _ in range(2):
                expected.optimizer.apply(gradients(expected, half), expected.trainable_variables)
        said.setdefault("joined", []).append([last, far(model, expected)])

    # two passes make one step: averaged, that is one step on twice the rows where these are equal parts
    passes = dict(backward_passes_per_step=2, average_aggregated_gradients=True)
    ways = {
        "fit": lambda o: on_batch(o, half, steps=4),
        "own": lambda o: own_loop(o, half),
        "compiled": lambda o: compiled_loop(o, half),
    }
    for way, go in ways.items():
        model = go(hvd.DistributedOptimizer(SGD(0.1), **passes))
        expected = on_batch(SGD(0.1), both, steps=2) if way == "fit" else own_loop(SGD(0.1), both, steps=2)
        said[f"passes {way}"] = [far(model, expected), int(numbers(model.optimizer.iterations))]
    said["sum"] = far(on_batch(hvd.DistributedOptimizer(SGD(0.05), op=hvd.Sum), half, 1),
                      on_batch(hvd.DistributedOptimizer(SGD(0.1)), half, 1))
    rounded = on_batch(hvd.DistributedOptimizer(SGD(0.1), compression=hvd.Compression.fp16), half)
    said["fp16"] = far(rounded, on_batch(SGD(0.1), both))

    # a local layer's gradient is its own, divided by the ranks
    for scale in (True, False):
        model = make(SGD(0.1))
        hvd.PartialDistributedOptimizer(model.optimizer, local_layers=model.layers[-1], scale_local_gradients=scale)
        model.train_on_batch(x[half], y[half])
        alone, both_ranks = on_batch(SGD(0.05 if scale else 0.1), half, 1), on_batch(SGD(0.1), both, 1)
        weights = list(zip(model.get_weights(), both_ranks.get_weights(), alone.get_weights()))
        said[f"local {scale}"] = [float(np.abs(a - b).max()) for a, b, _ in weights[:2]]
        said[f"local {scale}"] += [float(np.abs(a - c).max()) for a, _, c in weights[2:]]

    # scaled losses: the outer optimizer's step is the split one
    scaled = keras.optimizers.LossScaleOptimizer
    distributed = hvd.DistributedOptimizer
    for way in (lambda o: scaled(distributed(o), 2.0**10), lambda o: distributed(scaled(o, 2.0**10))):
        expected = on_batch(scaled(SGD(0.1), 2.0**10), both)
        said.setdefault("scaled", []).append(far(on_batch(way(SGD(0.1)), half), expected))
    """
    for result in trained(2, script):
        passes = {way: result.pop(f"passes {way}") for way in ("fit", "own", "compiled")}
        for way, (weights, iterations) in passes.items():
            assert weights <= 1e-6, (way, weights)
            assert iterations == 4
        assert 0 < result.pop("fp16") < 1e-3
        mixed, name = result.pop("mixed")
        assert mixed < 2e-3
        assert name == "LossScaleOptimizer"
        for last, weights in result.pop("joined"):
            assert last == 1
            assert weights <= 1e-6
        for kind, value in result.items():
            assert np_max(value) <= (1e-5 if "train_on_batch" in kind else 1e-6), (kind, value)


def np_max(value):
    return max(value) if isinstance(value, list) else value


def test_ranks_agree_or_are_told(trained):
    """Missing broadcast, unequal epochs, unequal rates, a step past the wrapper; stops and rates are one decision."""
    script = """
    def fit(model, *callbacks, rows=80, **how):
        how = {"batch_size": 16, "epochs": 2, "verbose": 0, "callbacks": list(callbacks), **how}
        return model.fit(x[:rows], y[:rows], **how)

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model = make(hvd.DistributedOptimizer(SGD(0.1)))
    model.set_weights([v + rank for v in model.get_weights()])
    said["unequal weights"] = wrong(lambda: fit(model))
    fit(model, broadcast)
    said["unequal epochs"] = wrong(lambda: fit(model, broadcast, rows=80 - 16 * rank))
    said["unequal reading"] = wrong(lambda: model.fit(  # as many as it yields, which nobody knows before
        ((x[:16], y[:16]) for _ in range(5 - rank)), verbose=0, callbacks=[broadcast]))
    said["unequal rates"] = wrong(lambda: fit(make(hvd.DistributedOptimizer(SGD(0.1 + rank)))))
    passes = lambda: make(hvd.DistributedOptimizer(SGD(0.1), backward_passes_per_step=1 + rank))
    said["unequal passes"] = wrong(lambda: fit(passes()))

    model = make(hvd.DistributedOptimizer(SGD(0.1)))
    model.quantize("float8")
    model.compile(model.optimizer, model.loss)
    said["float8"] = wrong(lambda: fit(model))

    class Past(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            self.model.optimizer.iterations.assign_add(1)

    said["past"] = wrong(lambda: fit(make(hvd.DistributedOptimizer(SGD(0.1))), Past()))

    class Stop(keras.callbacks.Callback):
        def __init__(self, at):
            super().__init__()
            self.at = at
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == self.at:
                self.model.stop_training = True

    for at in (1, 4):
        model = make(hvd.DistributedOptimizer(SGD(0.1)))
        fit(model, Stop(at))
        said[f"stopped at {at}"] = int(numbers(model.optimizer.iterations))

    # what decides is shown the same figures, though each rank's own differ
    model = make(hvd.DistributedOptimizer(SGD(0.1)))
    early = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    slower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
    path = os.environ["SAID"] + "/saved-by-{epoch}-" + str(rank) + ".keras"
    said["epochs"] = len(fit(model, early, slower, keras.callbacks.ModelCheckpoint(path), epochs=5).history["loss"])
    said["best"] = float(early.best)
    said["rate"] = float(numbers(model.optimizer.learning_rate))
    said["weights"] = [np.asarray(v).tolist() for v in model.get_weights()]
    said["files"] = sorted(f for f in os.listdir(os.environ["SAID"]) if f"-{rank}.keras" in f)
    """
    first, second = trained(2, script)
    for result in (first, second):
        assert "RankMismatchError: The weights of ranks [1]" in result["unequal weights"]
        assert "InexactLossError: Variable" in result["float8"]
        assert "BroadcastGlobalVariablesCallback" in result["unequal weights"]
        assert "hvd.shard" in result["unequal reading"]
        assert result["unequal epochs"].startswith("RankMismatchError: Rank 1 on ")
        assert "have different settings: batches (4 and 5)" in result["unequal epochs"]
        assert "different learning rates (0.1, 1.1)" in result["unequal rates"]
        assert "by Average, Compression.none. Build" in result["unequal passes"]
        assert "summed over 2 passes" in result["unequal passes"]
        assert "made 10 updates in this epoch, and 5 gradients" in result["past"]
        assert result["stopped at 1"] == 2
        assert result["stopped at 4"] == 5
        assert result["epochs"] == 2
    assert "Rank 0 has another batch" in first["unequal reading"]
    assert "Rank 1 has no batch left" in second["unequal reading"]
    for kind in ("best", "rate", "weights"):
        assert first[kind] == second[kind]
    assert first["files"] == ["saved-by-1-0.keras", "saved-by-2-0.keras"]
    assert second["files"] == []
