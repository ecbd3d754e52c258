"""Workers of several devices each: what they train together is what plain Keras, or workers of one device, train."""

import keras
import numpy as np
import pytest

import choros

LAYOUT = {"dense.*/kernel": (None, "model"), "dense.*/bias": ("model",)}


@pytest.fixture
def make():
    """A classifier whose layers two devices can divide."""

    def make(optimizer=None):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        model = keras.Sequential(
            [keras.Input((8,)), dense(6, "relu", name="dense"), dense(4, "softmax", name="dense_1")]
        )
        model.compile(optimizer or keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return make


@pytest.fixture(scope="module")
def two_each():
    """Two workers of two devices each."""
    with choros.WorkerPool(2, devices_per_worker=2) as pool:
        yield pool


@pytest.fixture
def fit(data):
    """Train on 61 rows in batches of 10, the last of which has one row; without a trainer's arguments by Keras."""

    def fit(model, *args, more=None, ahead=False, **kwargs):
        x, y = data(61)
        how = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x[:17], y[:17])}
        how |= more or {}
        if not args and not kwargs:
            return model.fit(x, y, **how)
        with choros.Trainer(model, *args, **kwargs) as trainer:
            if ahead:
                return trainer.fit(choros.prefetch((x, y)), **how | {"seed": 1})
            return trainer.fit(x, y, **how | {"seed": 1})

    return fit


def test_all_reduce_is_what_one_process_trains(make, fit, two_each, same, same_history):
    plain, alike, unlike = make(), make(), make()
    expected = fit(plain)
    for value, how in ((alike, {"pool": two_each}), (unlike, {"devices_per_worker": [2, 1], "ahead": True})):
        same_history(fit(value, workers=2, **how), expected, 2e-6)
        same(value, plain, 1e-6)


def test_workers_of_several_devices_train_each_in_its_own_time(make, fit, two_each, backend):
    if backend == "tensorflow":
        pytest.skip("its replicas are put together as PyTorch's are: once is enough")
    trained = make()
    history = fit(trained, "aeasgd", pool=two_each, more={"epochs": 6})
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert all(np.isfinite(weight).all() for weight in trained.get_weights())
    assert sum(worker.rows for worker in history.run.workers) == 6 * 61


def test_workers_that_meet_train_the_same_with_more_devices(make, fit, two_each, pools, same, same_history, backend):
    if backend == "tensorflow":
        pytest.skip("its replicas are put together as PyTorch's are: once is enough")
    first, several = make(), make()
    expected, history = (
        fit(model, "aeasgd", mode="sync", pool=pool) for model, pool in ((first, pools(2)), (several, two_each))
    )
    same_history(history, expected)
    same(several, first)


def layout_map(shape=(1, 2), names=("batch", "model")):
    mesh = keras.distribution.DeviceMesh(shape, names, devices=[f"cpu:{number}" for number in range(np.prod(shape))])
    layout = keras.distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUT.items():
        layout[f".*{pattern}"] = axes  # Keras matches whole paths
    return layout


@pytest.mark.parametrize("given_as", ["dict", "LayoutMap"])
def test_a_layout_divides_the_weights_and_changes_nothing(
    given_as, backend, make, fit, two_each, same, same_history, capsys, tmp_path
):
    if backend != "jax":
        pytest.skip("a layout needs JAX")
    layout = LAYOUT if given_as == "dict" else layout_map()
    plain, trained = make(keras.optimizers.Adam(0.01)), make(keras.optimizers.Adam(0.01))

    class Watched(keras.Sequential):
        def train_step(self, state, data):
            values = [variable._value for variable in [*self.weights, *self.optimizer.variables[2:]]]
            held = {str(getattr(value.sharding, "spec", "one device")) for value in values}
            (tmp_path / "held").write_text("\n".join(sorted(held)))
            return super().train_step(state, data)

    trained = Watched(trained.layers)
    trained.compile(keras.optimizers.Adam(0.01), plain.loss, metrics=["accuracy"])
    expected = fit(plain)
    history = fit(trained, pool=two_each, devices_per_worker=2, layout=layout, more={"verbose": 2})
    same_history(history, expected)
    same(trained, plain)
    line = "2 workers, 2 devices each, mesh batch 1, model 2: 4 of 4 variables divided (100% of the values)"
    assert line in capsys.readouterr().out.splitlines()
    import jax

    spec = [str(jax.sharding.PartitionSpec(*axes)) for axes in LAYOUT.values()]
    assert (tmp_path / "held").read_text().splitlines() == sorted(spec)  # weights and slots, on the workers


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dens_1": ("model",)}, "'dens_1' matches no variable of .*: they are .*dense/kernel"),
        ({"dense/kernel": (None, "wide")}, "along 'wide': the mesh has batch, model"),
        (
            {"dense/kernel": ("model",)},
            "dense/kernel has 1 dimensions, .'model',., and the variable has the shape \\(8, 6\\)",
        ),
        ({"dense/kernel": "model"}, "is 'model': give a tuple of an axis of the mesh or None for each dimension"),
        ({"dense/kernel": ("model", "model")}, "divides 'dense/kernel' twice along 'model'"),
        ({"dense(": ("model",)}, "'dense\\(' is not a regular expression"),
        ({"dense/ker": (None, "model"), "dense/kernel": (None, "model")}, "match one variable, .*dense/kernel: leave"),
        ([("dense/kernel", ("model",))], "The layout is of type list: give a keras.distribution.LayoutMap"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, message, backend, make, data, children):
    if backend != "jax":
        pytest.skip("a layout needs JAX")
    before = children()
    with pytest.raises(choros.InvalidInputError, match=message):
        choros.Trainer(make(), workers=2, devices_per_worker=2, layout=layout).fit(*data(61), verbose=0)
    assert children() == before


def test_a_layout_map_that_matches_a_part_of_a_path_is_refused(backend, make, data):
    if backend != "jax":
        pytest.skip("a layout needs JAX")
    layout = keras.distribution.LayoutMap(layout_map().device_mesh)
    layout["dense/kernel"] = (None, "model")
    with pytest.raises(choros.InvalidInputError, match="A LayoutMap's pattern matches whole paths: '.\\*dense/kernel'"):
        choros.Trainer(make(), workers=2, devices_per_worker=2, layout=layout).fit(*data(61), verbose=0)


def test_a_layout_for_other_devices_is_refused(backend, make, data):
    if backend != "jax":
        with pytest.raises(choros.InvalidInputError, match=f"layout= needs JAX; this is {backend}"):
            choros.Trainer(make(), workers=2, devices_per_worker=2, layout=LAYOUT)
        return
    with pytest.raises(
        choros.InvalidInputError,
        match="mesh is 1 x 2, which takes 2 devices, and there are 4 in each worker, by devices_per_worker=",
    ):
        choros.Trainer(make(), workers=2, devices_per_worker=4, layout=layout_map())
    with pytest.raises(choros.InvalidInputError, match="the same devices in every worker, not \\[2, 1\\]"):
        choros.Trainer(make(), workers=2, devices_per_worker=[2, 1], layout=LAYOUT)
    with pytest.raises(
        choros.InvalidInputError, match="of the shape \\(8, 6\\), along 'model', which has the size 4, and 6 is not a"
    ):
        choros.Trainer(make(), workers=1, devices_per_worker=4, layout=LAYOUT).fit(*data(61), verbose=0)


@pytest.mark.parametrize("devices", [0, -1, True, 1.5, [2], [2, 0], "2"])
def test_devices_that_are_no_numbers_are_refused(devices, make):
    with pytest.raises(
        choros.InvalidInputError, match="devices_per_worker=.*: give a whole number, 1 or more, or one for each"
    ):
        choros.Trainer(make(), workers=2, devices_per_worker=devices)


def test_the_devices_are_the_pools(make):
    with choros.WorkerPool(2, devices_per_worker=[2, 1]) as pool:
        with pytest.raises(
            choros.InvalidInputError, match="devices_per_worker=2, but the pool's workers have \\[2, 1\\]"
        ):
            choros.Trainer(make(), workers=2, pool=pool, devices_per_worker=2)
        choros.Trainer(make(), workers=2, pool=pool, devices_per_worker=[2, 1])
        assert not pool.started
