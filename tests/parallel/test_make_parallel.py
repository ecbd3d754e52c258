"""A model over devices of one process trains as plain Keras does on one.

The functions ``over_...`` are called in a process that has so many devices (``conftest.py``), with ``lab``, what stands
in ``conftest.py``; ``test_over_devices`` says of each whether it held.
"""

import contextlib
import io
import zipfile

import keras
import numpy as np
import pytest

from choros import parallel
from choros.errors import InvalidInputError

JAX = keras.backend.backend() == "jax"


def over_uneven_batches_train_evaluate_and_predict_as_one_device(lab):
    plain, model = lab.fitted(lab.count, sample_weight=lab.WEIGHT, **lab.CHECKED)
    requested = {"sample_weight": lab.WEIGHT, "batch_size": 7, "verbose": 0}
    lab.near(model.evaluate(lab.X, lab.Y, **requested), plain.evaluate(lab.X, lab.Y, **requested))
    lab.near(*(result.predict(lab.X, batch_size=7, verbose=0) for result in (model, plain)))


def over_two_class_weights_count(lab):
    lab.fitted(2, class_weight={0: 0.3, 1: 1.0, 2: 2.5, 3: 0.7})


def over_two_masked_steps_are_left_out(lab):
    layers = keras.layers
    inner = lambda: [keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True), layers.GRU(3)]
    lab.fitted(2, lambda: lab.make(inner), lab.TOKENS, validation_data=(lab.TOKENS[:20], lab.Y[:20]))


def over_single_batches_may_have_fewer_rows_than_devices(lab):
    plain, model = lab.pair(lab.count)
    for rows in (1, 13):
        x, y, weight = lab.X[:rows], lab.Y[:rows], lab.WEIGHT[:rows]
        lab.near(*(result.train_on_batch(x, y, weight) for result in (model, plain)))
        lab.near(*(result.predict_on_batch(x) for result in (model, plain)))
        lab.near(*(result.test_on_batch(x, y, weight) for result in (model, plain)))
    lab.same(model, plain)


def over_each_device_gets_its_rows_alone(lab):
    model = parallel.make_parallel(lab.make(), devices=lab.count)
    model.train_on_batch(lab.X, lab.Y)  # makes the replica
    counted = lab.count_bytes(model._in_process().replica)
    model.fit(lab.X, lab.Y, **lab.HOW)
    sent = [(rows, row) for rows in (10, 10, 10, 10, 10, 10, 1) * 2 for row in (24, 4)]  # x and y of each batch
    assert list(map(max, *counted)) == [-(-rows // lab.count) * row for rows, row in sent]
    if JAX:  # equal parts, the last ones filled up
        assert all(held == counted[0] for held in counted)
    else:
        assert list(map(sum, zip(*counted, strict=True))) == [rows * row for rows, row in sent]


def over_two_a_second_fit_goes_on_with_the_optimizer(lab):
    plain, model = lab.fitted(2, lambda: lab.make(optimizer=keras.optimizers.Adam(0.01)), times=2, atol=1e-5)
    lab.near(*([keras.ops.convert_to_numpy(slot) for slot in result.optimizer.variables] for result in (model, plain)))
    assert int(model.optimizer.iterations) == 28


def over_two_weights_set_between_fits_are_taken_up(lab):
    plain, model = lab.fitted(2)
    for result in (plain, model):
        result.set_weights([weight * 0.5 for weight in result.get_weights()])
        result.fit(lab.X, lab.Y, **lab.HOW)
    for result in (plain, model.serial):  # by Keras itself
        result.fit(lab.X[:20], lab.Y[:20], **lab.HOW)
    for result in (plain, model):
        result.fit(lab.X, lab.Y, **lab.HOW)
    lab.same(model, plain)


def over_two_the_file_is_the_serial_models(lab):
    _, model = lab.fitted(2)
    model.save("model.keras")
    model.save_weights("model.weights.h5")
    with zipfile.ZipFile("model.keras") as file:
        assert not [name for name in file.namelist() if b"choros" in file.read(name).lower()]
    loaded, reloaded = keras.saving.load_model("model.keras"), parallel.make_parallel(lab.make(), devices=2)
    assert (type(loaded), loaded.name) == (keras.Sequential, "serial")
    reloaded.train_on_batch(lab.X, lab.Y)
    reloaded.load_weights("model.weights.h5")
    for result in (model, reloaded):
        lab.near(result.predict(lab.X), loaded.predict(lab.X, verbose=0), atol=1e-6)


def over_two_callbacks_see_and_save_the_serial_model(lab):
    def fit(model, name):
        values = [
            keras.callbacks.ModelCheckpoint(name + "{epoch}.keras"),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
            keras.callbacks.EarlyStopping("val_accuracy", mode="min", patience=2, restore_best_weights=True),
        ]
        return model.fit(lab.X, lab.Y, **lab.HOW | lab.CHECKED | {"epochs": 6}, callbacks=values)

    plain, model = lab.pair(2)
    history = fit(model, "ours")
    lab.same_history(history, fit(plain, "plain"))
    lab.same(model, plain)
    assert len(history.epoch) < 6
    lab.near(*(keras.saving.load_model(f"{name}2.keras").get_weights() for name in ("ours", "plain")), atol=1e-6)


def over_two_an_exception_leaves_the_weights_of_when_training_stopped(lab):
    plain, model = lab.pair(2)
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        model.fit(lab.X, lab.Y, **lab.HOW, callbacks=[lab.Raise()])
    plain.fit(lab.X[:50], lab.Y[:50], **lab.HOW | {"epochs": 1})
    lab.same(model, plain)
    for result in (plain, model):
        result.fit(lab.X, lab.Y, **lab.HOW)
    lab.same(model, plain)


def over_two_a_pydataset_and_reading_ahead_train_the_same(lab):
    plain, model = lab.fitted(2, x=lab.Batches(), y=None, batch_size=None)
    lab.near(model.evaluate(lab.Batches()), plain.evaluate(lab.Batches(), verbose=0))
    _, ahead = lab.pair(2, enqueue=True)
    ahead.fit(lab.X, lab.Y, sample_weight=lab.WEIGHT, **lab.HOW)
    lab.same(ahead, plain)


def over_two_dropout_and_batch_normalization_see_the_whole_batch_on_jax(lab):
    def build(layer):
        return lab.make(lambda: [keras.Input((6,)), layer()])

    dropout, normal = lambda: build(lambda: keras.layers.Dropout(0.4)), lambda: build(keras.layers.BatchNormalization)
    if JAX:
        lab.fitted(2, dropout)
        lab.fitted(2, normal, atol=1e-5)
        return
    for make in (dropout, normal):  # each device has masks of its own; what it averages is made equal
        model = lab.pair(2, make)[1]
        model.fit(lab.X, lab.Y, **lab.HOW)
        assert np.isfinite(model.evaluate(lab.X, lab.Y)).all()
        saved = np.array([[v.numpy() for v in result.moving] for result in model._in_process().replica.replicas])
        np.testing.assert_array_equal(saved[0], saved[1])


def over_two_a_compiled_model_predicts_before_it_is_trained(lab):
    plain, model = lab.pair(2)
    lab.near(model.predict(lab.X), plain.predict(lab.X, verbose=0))


def over_two_what_is_set_is_set_in_the_serial_model(lab):
    model = parallel.make_parallel(lab.make(), devices=2)
    before, model.trainable = model.get_weights(), False
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(lab.X, lab.Y, verbose=0)
    assert model.serial.trainable is False
    lab.near(model.get_weights(), before, atol=0)


def over_two_a_model_that_is_not_compiled_predicts_and_no_more(lab):
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)], name="plain")
    model = parallel.make_parallel(plain, devices=-1)
    lab.near(model.predict(lab.X), plain.predict(lab.X, verbose=0))
    with pytest.raises(InvalidInputError, match="'plain' is not compiled"):
        model.fit(lab.X, lab.Y)


def over_two_the_names_and_arguments_of_old(lab):
    serial, names = lab.make(), ["/cpu:0", "/device:CPU:1"]
    eight = parallel.make_parallel(serial, names, "/cpu:0", False, True, False, False, parallel.ModelMGPU)
    models = [eight, parallel.multi_gpu_model(serial, 2), parallel.multi_gpu_model(serial, [1, 0])]
    assert [model.devices for model in models] == [["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"]]
    assert all(model.serial is serial and model.layers == serial.layers for model in models)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        parallel.print_mgpu_modelsummary(eight)
        eight.fit(lab.X, lab.Y, verbose=2)
    assert output.getvalue().count("serial over 2 devices") == output.getvalue().count("cpu:0, cpu:1") == 2
    assert "Total params" in output.getvalue()


def over_two_devices_are_objects_and_full_names(lab):
    class Spec:  # as a tf.DeviceSpec
        def to_string(self):
            return "/job:localhost/replica:0/task:0/device:CPU:1"

    serial = lab.make()
    full = ["/job:worker/task:1/device:CPU:1", "/job:worker/replica:0/task:1/cpu:0"]
    assert parallel.make_parallel(serial, full).devices == ["cpu:1", "cpu:0"]
    assert parallel.make_parallel(serial, ["cpu:0", Spec()]).devices == ["cpu:0", "cpu:1"]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        native = jax.devices("cpu")[:2]
    elif backend == "torch":
        import torch

        native = [torch.device("cpu"), torch.device("cpu", 1)]
    else:
        import tensorflow as tf

        native = [tf.DeviceSpec(device_type="CPU", device_index=0), tf.config.list_logical_devices("CPU")[1]]
    plain, model = lab.make(), parallel.make_parallel(serial, devices=native)
    assert model.devices == ["cpu:0", "cpu:1"]
    for each in (plain, model):
        each.fit(lab.X, lab.Y, **lab.HOW)
    lab.same(model, plain)


def over_the_placement_has_the_device_of_each_variable_and_of_each_row(lab):
    plain, model = lab.pair(lab.count)
    names = tuple(f"cpu:{number}" for number in range(lab.count))
    placement = model.placement(lab.X[:13], lab.Y[:13])
    listed = {(held.path, held.shape) for held in placement.variables}
    variables = [*model.serial.variables, *model.optimizer.variables]
    assert {(variable.path, tuple(variable.shape)) for variable in variables} <= listed
    assert {held.devices for held in placement.variables} == {names}
    rows = [(shard.start, shard.stop, shard.device) for shard in placement.shards]
    if JAX:  # equal parts, of which the last ones are filled up
        each = -(-13 // lab.count)
        assert rows == [
            (min(number * each, 13), min((number + 1) * each, 13), name) for number, name in enumerate(names)
        ]
    else:
        sizes = [13 // lab.count + (number < 13 % lab.count) for number in range(lab.count)]
        ends = np.cumsum(sizes).tolist()
        assert rows == list(zip([0, *ends[:-1]], ends, names, strict=True))
    if lab.count > 2:
        few = model.placement(lab.X[:1], lab.Y[:1]).shards
        assert [(shard.stop - shard.start, shard.device) for shard in few] == [
            (1 if number == 0 else 0, name) for number, name in enumerate(names)
        ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        parallel.print_placement(model, lab.X[:13], lab.Y[:13])
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(placement.variables) + lab.count
    assert lines[-lab.count] == f"rows 0 to {rows[0][1] - 1} of 13: cpu:0"
    assert sum(line.endswith(", ".join(names)) for line in lines) == len(placement.variables)
    for each in (plain, model):  # a look at the placement changes nothing
        each.fit(lab.X, lab.Y, **lab.HOW)
    lab.same(model, plain)


def test_over_devices(passed):
    passed()


SERIAL = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


@pytest.mark.parametrize("devices", [0, 1, ["cpu:0"], ("/CPU:0",)])
def test_fewer_than_two_devices_give_the_serial_model(devices):
    assert parallel.make_parallel(SERIAL, devices) is parallel.make_parallel(SERIAL, devices=devices) is SERIAL


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ps_device", "/gpu:0", "make_parallel: gradients are always added"),
        ("usenccl", True, "make_parallel: gradients are always added"),
        ("initsync", False, "make_parallel: gradients are always added"),
        ("syncopt", True, "make_parallel: gradients are always added"),
        ("cpu_merge", False, "multi_gpu_model: outputs are joined"),
        ("cpu_relocation", True, "multi_gpu_model: outputs are joined"),
    ],
)
def test_an_argument_without_effect_is_warned_of_once(name, value, reason, monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    function = getattr(parallel, reason.partition(":")[0])
    with pytest.warns(UserWarning, match=f"^{name} has no effect on {reason}"):
        function(SERIAL, 1, **{name: value})
    function(SERIAL, 1, **{name: value})  # a second warning would be an error


REFUSED = {
    "one is named twice": lambda: parallel.make_parallel(SERIAL, ["cpu:0", "/CPU:0"]),
    "no device 'tpu:7'": lambda: parallel.make_parallel(SERIAL, ["cpu:0", "tpu:7"]),
    "no device 'disk:0'": lambda: parallel.make_parallel(SERIAL, ["cpu:0", "disk"]),
    "one is named twice.": lambda: parallel.make_parallel(SERIAL, ["cpu", "/job:localhost/task:0/device:CPU:0"]),
    "'gpu zero' is not a name of a device": lambda: parallel.make_parallel(SERIAL, ["cpu:0", "gpu zero"]),
    "/replica:1/cpu:0 is of another process": lambda: parallel.make_parallel(SERIAL, "/replica:1/cpu:0"),
    "0 of type int is not a device: give a name": lambda: parallel.make_parallel(SERIAL, [0, 1]),
    "of several processes: give the devices of this": lambda: parallel.make_parallel(
        SERIAL, ["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"]
    ),
    "device /job:ps/task:0/cpu:0 is of another process": lambda: parallel.make_parallel(SERIAL, "/job:ps/task:0/cpu:0"),
    "devices=-3: there are": lambda: parallel.make_parallel(SERIAL, -3),
    "devices=True: there are": lambda: parallel.make_parallel(SERIAL, True),
    "gdev_list and devices are the same": lambda: parallel.make_parallel(SERIAL, 2, devices=2),
    "devices=.*: give two or more": lambda: parallel.ModelMGPU(SERIAL, 0),
    "serial_model is of type str: give a keras.Model": lambda: parallel.ModelMGPU("model", devices=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(InvalidInputError, match=message):
        REFUSED[message]()
