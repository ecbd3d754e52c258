"""Law 4: a saved model loads in plain Keras where there is no choros."""

import numpy as np
import pytest

import choros

PLAIN = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "choros":
            raise ModuleNotFoundError("there is no choros here")

sys.meta_path.insert(0, Refuse())
import json, keras, numpy as np

class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale

x = np.load("x.npy")
for name in json.load(open("names.json")):
    model = keras.saving.load_model(name + ".keras", custom_objects={"Scale": Scale})
    saved = np.load(name + ".npz")
    for given, loaded in zip(saved.values(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(given, loaded, err_msg=name)
    model.fit(x, np.zeros(len(x), "int32"), verbose=0)
    assert model.compiled and "choros" not in sys.modules
    print("loaded", name, int(model.optimizer.iterations))
"""


def models(make_mlp):
    import keras

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x):
            return x * self.scale

    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), Scale(), keras.layers.BatchNormalization(), keras.layers.Dense(3, "softmax")]
    custom = keras.Sequential(layers)
    custom.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return {"plain": (make_mlp(), "allreduce"), "custom": (custom, "aeasgd"), "members": (make_mlp(), "ensemble")}


def test_saved_models_load_without_choros(pools, make_mlp, data, clean_python, tmp_path):
    import json

    import keras

    x, y = data(rows=64)
    np.save(tmp_path / "x.npy", x)
    names = []

    def keep(name, model):
        np.savez(tmp_path / f"{name}.npz", *model.get_weights())
        names.append(name)

    for name, (model, algorithm) in models(make_mlp).items():
        checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / f"{name}-checkpoint.keras"))
        trainer = choros.Trainer(model, algorithm, workers=2, pool=pools(2))
        trainer.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[checkpoint])
        model.save(tmp_path / f"{name}.keras")
        keep(name, model)
        if name == "plain":  # together, the last epoch's checkpoint is the end
            keep(f"{name}-checkpoint", model)
        for number, member in enumerate(trainer.models):
            member.save(tmp_path / f"{name}-{number}.keras")
            keep(f"{name}-{number}", member)
    (tmp_path / "names.json").write_text(json.dumps(names))
    done = clean_python(PLAIN)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert [name for _, name, _ in lines] == [
        "plain",
        "plain-checkpoint",
        "custom",
        "members",
        "members-0",
        "members-1",
    ]
    iterations = {name: int(count) for _, name, count in lines}
    assert iterations["plain"] == 8 + 2  # AllReduce hands the optimizer's slots back, and the file has them


def test_the_given_model_is_a_model_of_its_own_class(pools, make_mlp, data):
    model, (x, y) = make_mlp(), data(rows=32)
    before = type(model), type(model.optimizer), set(vars(model))
    choros.Trainer(model, "localsgd", workers=2, pool=pools(2)).fit(x, y, batch_size=16, verbose=0)
    assert (type(model), type(model.optimizer)) == before[:2]
    remaining = {name: value for name, value in vars(model).items() if "choros" in str(type(value).__module__)}
    assert not remaining
    assert model.fit(x, y, verbose=0).history["loss"]
    assert model.evaluate(x, y, verbose=0)[0] == pytest.approx(float(model.evaluate(x, y, verbose=0)[0]))
