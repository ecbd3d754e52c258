"""Ranks that are about to train different models, or in different ways: every rank is told before the first step."""

SCRIPT = """
from choros.hvd import fit_consistency as beginning

layers, SGD = keras.layers, keras.optimizers.SGD
rng = np.random.default_rng(0)
x, y = rng.normal(size=(40, 6)).astype("float32"), rng.integers(0, 3, 40)
steps = []

def make(activation="relu", units=5, given=True, optimizer=None, **how):
    keras.utils.set_random_seed(1)
    parts = [layers.Dense(units, activation), layers.Lambda(lambda x: x * 2), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,))] * given + parts)
    how = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"], **how}
    model.compile(hvd.DistributedOptimizer(optimizer or SGD(0.1)), **how)
    return model

def fit(model, **how):
    steps.clear()
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    how = {"x": x, "y": y, "batch_size": 8, "verbose": 0, "callbacks": [seen], **how}
    try:
        model.fit(**how)
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(steps)
    return "", len(steps)

unlike = {
    "activation": {"activation": "tanh"},
    "units": {"units": 4},
    "loss": {"loss": keras.losses.SparseCategoricalCrossentropy()},
    "metrics": {"metrics": []},
    "optimizer": {"optimizer": SGD(0.1, momentum=0.9)},
}
for name, how in unlike.items():
    said[name] = fit(make(**how if rank else {}))
said["rows"] = fit(make(), **{"x": x[:24], "y": y[:24]} if rank else {})

# built by the data, which have other columns on one rank
columns = x[:, :5] if rank else x
said["columns"] = fit(make(given=False), x=columns)

libraries = beginning.facts_of_model
for name, other in {"libraries": {"keras": "3.0.0"}, "script": "0"}.items():
    beginning.facts_of_model = lambda model: {**libraries(model), **({name: other} if rank else {})}
    said[name] = fit(make())
beginning.facts_of_model = libraries

# what belongs to one rank
if rank:
    make()  # Keras counts on: other names
    alone = {"verbose": 2}
else:
    alone = {"validation_data": (x, y), "callbacks": [keras.callbacks.TerminateOnNaN()]}
said["alone"] = fit(make(), **alone)[0]
path = os.path.join(os.environ["SAID"], "rank0.keras")
model = make(given=False)
if rank == 0:  # it goes on from a file, the others take its weights
    other = make()
    other.fit(x, y, verbose=0) if size == 1 else other.save(path)
    model = keras.models.load_model(path, safe_mode=False)
    hvd.DistributedOptimizer(model.optimizer)
said["file"] = fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])[0]
"""


def test_every_rank_is_told_who_differs_where_and_what_before_a_step(run):
    messages = {
        "activation": "model (layer 1 (Dense): activation 'tanh' and 'relu')",
        "units": "model (layer 1 (Dense): units 4 and 5)",
        "loss": "loss ('SparseCategoricalCrossentropy(",
        "metrics": "metrics ([] and ['accuracy'])",
        "optimizer": "optimizer (['SGD', ",
        "rows": "batches (3 and 5)",
        "libraries": "libraries ({'keras': '3.0.0'} and ",
    }
    for result in run(2, SCRIPT):
        for name, word in messages.items():
            message, steps = result[name]
            assert message.startswith("RankMismatchError: Rank 1 on "), (name, message)
            assert f"have different settings: {word}" in message, (name, message)
            assert "Build and compile the same model on every rank" in message
            assert steps == 0
        message, steps = result["columns"]
        assert "The ranks train different models, or were given different settings: rank 1 on " in message
        assert "with rows of the same shape" in message
        assert steps == 0
        assert result["script"] == ["", 5]  # it is only warned of
        assert result["alone"] == result["file"] == ""
