"""Law 2: every batch counts. No row is dropped or trained twice, and what was learnt last is exchanged too."""

import json
import os

import numpy as np
import pytest

import choros

BACKEND = os.environ["KERAS_BACKEND"]
RATE, EPOCHS = 1 / 64, 2


def weight(model):
    return float(np.asarray(model.trainable_variables[0]).item())


def rows_of(count):
    return np.ones((count, 1), "float32"), np.arange(count, dtype="float32").reshape(-1, 1)


def setting(kind):
    """The algorithm with a window that divides neither an epoch nor the run, and rates at which the walk is exact."""
    more = {"DiLoCo": {"outer_rate": 0.5, "outer_momentum": 0.5}, "EAMSGD": {"momentum": 0.5}}.get(kind.__name__, {})
    if kind.__name__ not in ("Single", "AllReduce", "Averaging", "Ensemble"):
        more["window"] = 3
    return kind(**more)


@pytest.mark.parametrize(("workers", "rows", "batch"), [(2, 45, 12), (3, 38, 12)], ids=["two", "three"])
def test_each_row_once_and_each_step_in_the_center(pools, kind, ledger, center_walks, workers, rows, batch):
    single = kind is choros.Single
    workers = 1 if single else workers
    model = ledger(rows, RATE)
    trainer = choros.Trainer(model, setting(kind), workers=workers, pool=pools(3 if workers == 3 else 2))
    history = trainer.fit(
        *rows_of(rows),
        batch_size=batch,
        epochs=EPOCHS,
        seed=3,
        verbose=0,
    )
    if kind is not choros.Ensemble:  # its logs are those of one member
        assert history.history["missed"] == [0.0] * EPOCHS
    run = history.run
    assert run.rows == sum(worker.rows for worker in run.workers) == EPOCHS * rows
    steps, bound = [worker.steps for worker in run.workers], run.algorithm
    if kind is choros.Ensemble:
        assert [weight(member) for member in trainer.models] == pytest.approx([-RATE * count for count in steps])
    elif kind is choros.DOWNPOUR:
        assert weight(model) == pytest.approx(-RATE * sum(steps))  # the sum of all contributions
    elif kind is choros.AGN:
        assert weight(model) == pytest.approx(-RATE * run.exchanges)  # each is a mean step
    elif trainer.mode == "async":
        assert run.exchanges == sum(-(-count // 3) for count in steps)
        assert -RATE / (1 - bound.momentum) * sum(steps) <= weight(model) < 0
    elif workers < 3:  # all ranks have rows in every batch
        expected = center_walks(bound, -(-rows // batch), EPOCHS, RATE, workers)
        assert weight(model) == pytest.approx(expected, rel=1e-6)
    assert weight(model) != 0


ASYNCHRONOUS = [kind for kind in choros.algorithms.ALL if kind.mode == "async"]


@pytest.mark.parametrize("kind", ASYNCHRONOUS, ids=lambda kind: kind.__name__)
def test_by_one_worker_the_center_walks_as_the_maths_says(pools, kind, ledger, center_walks):
    model = ledger(50, RATE)
    trainer = choros.Trainer(model, setting(kind), workers=1, pool=pools(2))
    history = trainer.fit(*rows_of(50), batch_size=8, epochs=EPOCHS, seed=3, verbose=0)
    assert history.history["missed"] == [0.0] * EPOCHS
    assert weight(model) == pytest.approx(center_walks(history.run.algorithm, 7, EPOCHS, RATE), rel=1e-5)


@pytest.mark.parametrize("name", ["LocalSGD", "DOWNPOUR"])
def test_a_window_longer_than_the_run_is_exchanged_at_its_end(pools, ledger, name):
    model = ledger(48, RATE)
    trainer = choros.Trainer(model, getattr(choros, name)(window=1000), workers=2, pool=pools(2))
    run = trainer.fit(*rows_of(48), batch_size=8, epochs=EPOCHS, verbose=0).run
    steps = [worker.steps for worker in run.workers]
    assert steps == [12, 12]
    assert [worker.exchanges for worker in run.workers] == [1, 1]
    assert weight(model) == pytest.approx(-RATE * (sum(steps) if name == "DOWNPOUR" else steps[0]))


def test_members_of_an_ensemble_together_train_each_row_once(pools):
    import keras

    class Marked(keras.losses.Loss):  # row i moves weight i by the learning rate
        def call(self, y_true, y_pred):
            return keras.ops.sum(y_true * y_pred, axis=-1)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return np.ones((5, 1), "float32"), np.eye(35, dtype="float32")[5 * index : 5 * index + 5]

    for data in ((np.ones((35, 1), "float32"), np.eye(35, dtype="float32")), (Batches(),)):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(35, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.5), Marked(reduction="sum"))
        trainer = choros.Trainer(model, "Ensemble", workers=2, pool=pools(2))
        trainer.fit(*data, epochs=EPOCHS, verbose=0, **({"batch_size": 12} if len(data) == 2 else {}))
        moved = sum(keras.ops.convert_to_numpy(member.weights[0]) for member in trainer.models)
        np.testing.assert_allclose(moved, np.full((1, 35), -0.5 * EPOCHS))


@pytest.mark.parametrize("name", ["AllReduce", "LocalSGD", "AEASGD"])
def test_batches_of_a_dataset_count_once(pools, ledger, name):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            y = np.arange(5 * index, 5 * index + 5, dtype="float32").reshape(-1, 1)
            return np.ones((5, 1), "float32"), y

    model = ledger(35, RATE)
    history = choros.Trainer(model, name, workers=2, pool=pools(2)).fit(Batches(), epochs=EPOCHS, verbose=0)
    assert history.history["missed"] == [0.0] * EPOCHS
    assert history.run.rows == EPOCHS * 35


def source_of(kind, rows, batch, folder):
    """Return the rows of the ledger as one kind of source, in batches of ``batch``, and the arguments of fit."""
    import keras

    x, y = rows_of(rows)
    parts = [(x[i : i + batch], y[i : i + batch]) for i in range(0, rows, batch)]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(parts)

        def __getitem__(self, index):
            return parts[index]

    if kind == "files":
        (folder / "rows.csv").write_text("u,v\n" + "".join(f"1.0,{i}.0\n" for i in range(rows)))
        return choros.files(folder / "rows.csv", x=["u"], y=["v"]), {"batch_size": batch}
    if kind == "mapped":
        np.save(folder / "x.npy", x)
        return np.load(folder / "x.npy", mmap_mode="r"), {"y": y, "batch_size": batch}
    if kind == "weighted":
        return x, {"y": y, "batch_size": batch, "sample_weight": np.ones(rows, "float32")}
    if kind == "stream":
        return (part for _ in range(EPOCHS) for part in parts), {"steps_per_epoch": len(parts)}
    return (Batches(), {"shuffle": False}) if kind == "dataset" else (x, {"y": y, "batch_size": batch})


# How rows are divided does not depend on the backend: on two of the three, some kinds of source are enough.
KINDS = [
    pytest.param(kind, marks=() if kind in ("arrays", "dataset") or BACKEND == "jax" else pytest.mark.long)
    for kind in ("arrays", "mapped", "weighted", "files", "dataset", "stream")
]


@pytest.mark.parametrize("batch", [7, 2], ids=["larger", "smaller"])
@pytest.mark.parametrize("name", ["AEASGD", "DOWNPOUR", "LocalSGD"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_each_of_three_workers_a_step_for_each_global_batch(
    pools, ledger, tmp_path, kind, name, batch
):
    """Batches of 7, ..., 7, 2 rows are dealt out as 3, 2, 2 and 1, 1, 0; those of 2 rows as 1, 1, 0."""
    rows = 30
    model = ledger(rows, RATE)
    x, inputs = source_of(kind, rows, batch, tmp_path)
    trainer = choros.Trainer(model, getattr(choros, name)(window=3), workers=3, pool=pools(3))
    history = trainer.fit(x, epochs=EPOCHS, verbose=0, **inputs)
    assert history.history["missed"] == [0.0] * EPOCHS
    count, workers = -(-rows // batch), history.run.workers
    assert sum(worker.rows for worker in workers) == EPOCHS * rows
    if name == "LocalSGD":  # all meet after each third global batch, whether they have rows of it or not
        assert [worker.steps for worker in workers] == [EPOCHS * count] * 3
        assert [worker.exchanges for worker in workers] == [-(-EPOCHS * count // 3)] * 3
        return
    # asynchronous: no step, and no exchange, for a batch of which a worker has no rows
    steps = [EPOCHS * count, EPOCHS * count, EPOCHS * (count - 1) if batch == 7 else 0]
    if kind == "dataset" and batch == 2:  # each worker reads every third batch, and trains its shares: 1, 1 and 0 rows
        steps = [EPOCHS * 10] * 3
    assert [worker.steps for worker in workers] == steps
    assert [worker.exchanges for worker in workers] == [-(-made // 3) for made in steps]
    if kind != "dataset":
        assert [worker.rows for worker in workers] == [EPOCHS * r for r in ((13, 9, 8) if batch == 7 else (15, 15, 0))]
    if name == "DOWNPOUR":
        assert weight(model) == pytest.approx(-RATE * sum(steps))


def test_by_every_algorithm_under_choros_run(ledger_source, clean_python):
    names = [kind.__name__ for kind in choros.algorithms.ALL if kind not in (choros.Single, choros.Ensemble)]
    done = clean_python(
        "import json, choros, numpy as np\n"
        f"{ledger_source}\n"
        f"for name in {names}:\n"
        f"    model = make_ledger(45, {RATE})\n"
        "    x, y = np.ones((45, 1), 'float32'), np.arange(45, dtype='float32').reshape(-1, 1)\n"
        f"    history = choros.Trainer(model, name).fit(x, y, batch_size=12, epochs={EPOCHS}, seed=3, verbose=0)\n"
        "    w = float(np.asarray(model.trainable_variables[0]).item())\n"
        "    print(json.dumps([name, history.history['missed'], history.run.rows, w]), flush=True)\n",
        before=("-m", "choros", "run", "-n", "2"),
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    messages = {mark: [json.loads(text) for m, _, text in lines if m == mark] for mark in ("[0]", "[1]")}
    assert [name for name, *_ in messages["[0]"]] == names
    assert messages["[0]"] == messages["[1]"]  # the same weights, bit by bit, on every rank
    assert [(missed, rows) for _, missed, rows, _ in messages["[0]"]] == [([0.0] * EPOCHS, EPOCHS * 45)] * len(names)
    assert all(w < 0 for *_, w in messages["[0]"])
