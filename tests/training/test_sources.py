"""Training from what is not arrays: files that the workers read, and streams that the caller reads for them."""

import itertools
import subprocess
import sys
import textwrap
import threading

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import choros


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    room = tmp_path_factory.mktemp("rows")
    x = np.random.default_rng(0).normal(size=(503, 4)).astype("float32")
    table = pa.table({**{name: x[:, i] for i, name in enumerate("abcd")}, "label": (x.sum(1) > 0).astype("int64")})
    pa.parquet.write_table(table.slice(0, 400), room / "train.parquet", row_group_size=30)
    pa.parquet.write_table(table.slice(400), room / "valid.parquet", row_group_size=30)
    return room


def model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(folder, pool, workers, **more):
    trained = model()
    data, valid = (choros.files(folder / f"{part}.parquet", y="label") for part in ("train", "valid"))
    trainer = choros.Trainer(trained, workers=workers, pool=pool)
    inputs = dict(epochs=3, batch_size=37, seed=2, verbose=0, validation_data=valid)
    return trained, trainer.fit(data, **inputs | more).history


@pytest.mark.parametrize("class_weight", [None, {1: 4.0}])
def test_rows_of_files_train_exactly_for_any_number_of_workers(folder, pools, class_weight):
    (first, one_logs), (two, two_logs) = (fit(folder, pools(n), n, class_weight=class_weight) for n in (1, 2))
    for a, b in zip(first.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, values in one_logs.items():
        np.testing.assert_allclose(values, two_logs[name], rtol=1e-6, err_msg=name)
    columns = {
        name: np.array(rows) for name, rows in pa.parquet.read_table(folder / "valid.parquet").to_pydict().items()
    }
    loss, _ = two.evaluate(np.stack([columns[name] for name in "abcd"], 1), columns["label"], verbose=0)
    np.testing.assert_allclose(loss, two_logs["val_loss"][-1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["arrays", "files", "stream"])
def test_a_run_that_was_cut_short_goes_on_in_the_middle_of_an_epoch(folder, pools, tmp_path, kind):
    """Adam's slots too; epoch 1 (from 0) goes on with its fifth batch."""
    columns = pa.parquet.read_table(folder / "train.parquet").to_pydict()
    x, y = np.stack([columns[name] for name in "abcd"], 1).astype("float32"), np.array(columns["label"])
    files = {"x": choros.files(folder / "train.parquet", y="label")}

    def batches():
        return (part for turn in range(3) for part in zip(np.split(x, 10), np.split(y, 10), strict=True))

    def train(model, left=(), **how):
        inputs = {"arrays": {"x": x, "y": y}, "files": files, "stream": {"x": itertools.islice(batches(), *left, None)}}
        trainer = choros.Trainer(model, workers=2, pool=pools(2))
        steps = 10 if kind == "stream" else None
        trainer.fit(**inputs[kind], epochs=3, batch_size=40, seed=5, verbose=0, steps_per_epoch=steps, **how)
        return model

    class Keep(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, 3):
                self.model.save(tmp_path / "cut.keras")

    first = model()
    first.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    uninterrupted = train(first, callbacks=[Keep()])
    # what is read of a stream is the caller's own: here it begins where the epoch began
    rest = train(keras.models.load_model(tmp_path / "cut.keras"), left=(10,), initial_epoch=1, initial_batch=4)
    for a, b in zip(uninterrupted.get_weights(), rest.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_decode_raises_in_a_worker_is_told(folder, pools):
    def decode(columns):
        if len(columns["a"]) < 30:
            raise ValueError("these rows are bad")
        return columns

    data = choros.files(folder / "train.parquet", y="label", decode=decode)
    with pytest.raises(choros.WorkerFailedError, match="these rows are bad"):
        choros.Trainer(model(), workers=2, pool=pools(2)).fit(data, verbose=0)


def test_targets_beside_files_and_a_split_of_them_are_refused(folder):
    data = choros.files(folder / "train.parquet", y="label")
    with pytest.raises(choros.InvalidInputError, match="y was given beside a FileSource"):
        choros.Trainer(model()).fit(data, np.zeros(400))
    with pytest.raises(choros.InvalidInputError, match="validation_split cannot cut a FileSource"):
        choros.Trainer(model()).fit(data, validation_split=0.2)


def test_ranks_of_a_job_decode_together(folder, tmp_path):
    script = """
        import sys
        import keras
        import choros
        from choros.cluster import Place

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        data = choros.files(sys.argv[1], y="label")
        fill, filled = data.fill, []
        data.fill = lambda block: (filled.append(block), fill(block))
        for algorithm in ("allreduce", "aeasgd"):
            choros.Trainer(model, algorithm).fit(data, batch_size=40, epochs=2, verbose=0)
        print("rank", Place.here().rank, "decoded", *filled)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [
        sys.executable,
        "-m",
        "choros",
        "run",
        "-n",
        "2",
        str(tmp_path / "train.py"),
        str(folder / "train.parquet"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line.split("decoded")[1].split() for line in done.stdout.splitlines() if "decoded" in line]
    assert len(lines) == 2
    assert sorted(map(int, lines[0] + lines[1])) == list(range(14))  # each row group once, by one of the ranks


def rows():
    x = np.random.default_rng(0).normal(size=(203, 4)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")


def batches(count=None, size=37):
    """Global batches, of 37 rows and of what is left, again and again."""
    x, y = rows()
    tops = itertools.islice(itertools.cycle(range(0, len(x), size)), count)
    yield from ((x[top : top + size], y[top : top + size]) for top in tops)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_trains_as_keras_does(pools, workers):
    x, y = rows()
    plain, trained, second = model(), model(), model()
    history = plain.fit(x, y, batch_size=37, epochs=3, shuffle=False, verbose=0, validation_data=(x, y)).history
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.tensor, (x, y))), batch_size=37)
    trainer = choros.Trainer(trained, workers=workers, pool=pools(workers))
    caught = trainer.fit(loader, epochs=3, verbose=0, validation_data=loader)
    trainer = choros.Trainer(second, workers=workers, pool=pools(workers))
    trainer.fit(batches(), steps_per_epoch=6, epochs=3, verbose=0)
    for a, b, c in zip(plain.get_weights(), trained.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_allclose(a, c, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(values, caught.history[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("algorithm", ["localsgd", "aeasgd"])
def test_a_stream_trains_every_row_once_by_other_algorithms(pools, algorithm):
    trained = model()
    record = (
        choros.Trainer(trained, algorithm, pool=pools(2)).fit(batches(), steps_per_epoch=6, epochs=2, verbose=0).run
    )
    assert sum(worker.rows for worker in record.workers) == 2 * 203


def test_the_end_of_a_stream_and_its_errors_are_the_callers(pools):
    def broken():
        yield from batches(7)
        raise ZeroDivisionError("in the user's generator")

    trainer = choros.Trainer(model(), workers=2, pool=pools(2))
    inputs = trainer.model.get_weights()
    with pytest.raises(ZeroDivisionError, match="in the user's generator"):
        trainer.fit(broken(), steps_per_epoch=6, epochs=3, verbose=0)
    with pytest.raises(
        choros.InvalidInputError, match="A generator ended after 7 batches, in the middle of an epoch of 6 steps"
    ):
        trainer.fit(batches(7), steps_per_epoch=6, epochs=3, verbose=0)
    with pytest.raises(choros.InvalidInputError, match="can be gone through once, and 3 epochs"):
        trainer.fit(batches(7), epochs=3, verbose=0)
    assert all(map(np.array_equal, inputs, trainer.model.get_weights()))
    with pytest.raises(choros.InvalidInputError, match="which a stream does not give"):
        choros.Trainer(model(), "ensemble", workers=2, pool=pools(2)).fit(batches(6), verbose=0)
    trainer.fit(batches(6), verbose=0)  # the pool is as good as new


def test_a_callback_that_stops_ends_the_reading_of_an_endless_stream(pools):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 3

    read = []
    stream = (read.append(1) or batch for batch in batches())
    history = choros.Trainer(model(), workers=2, pool=pools(2)).fit(
        stream, steps_per_epoch=100, epochs=5, verbose=0, callbacks=[Stop()]
    )
    assert len(history.history["loss"]) == 1
    assert 4 <= len(read) < 12
    assert not [thread for thread in threading.enumerate() if thread.name == "choros-feeder"]


def test_ranks_of_a_job_take_their_shares_and_must_see_the_same_stream(tmp_path):
    script = """
        import keras, numpy as np
        import choros
        from choros.cluster import Place

        def batches(seed):
            rng = np.random.default_rng(seed)
            for _ in range(5):
                x = rng.normal(size=(7, 4)).astype("float32")
                yield x, x.sum(1, keepdims=True)

        def train(seed, **how):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse")
            (choros.Trainer(model).fit if Place.here().size > 1 and not how else model.fit)(batches(seed), verbose=0)
            return np.concatenate([w.ravel() for w in model.get_weights()])

        np.testing.assert_allclose(train(0), train(0, plain=True), atol=1e-6)
        try:
            train(Place.here().rank)
        except choros.InvalidInputError as error:
            assert "have different settings: first_batch" in str(error), error
            print("refused")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2


def doubled(x):
    assert threading.current_thread().name in (
        "choros-ahead",
        "choros-feeder",
        "MainThread",
    )  # the sample's is the last
    return x * 2


@pytest.mark.parametrize("kind", ["arrays", "files", "stream"])
def test_what_is_read_ahead_and_augmented_trains_as_what_is_given_so(folder, pools, kind):
    x, y = rows()
    trained = []
    for workers in (1, 2):
        data = {
            "arrays": lambda: (x, y),
            "files": lambda: choros.files(folder / "train.parquet", y="label"),
            "stream": batches,
        }[kind]()
        inputs = choros.prefetch(data, depth=3, augment=doubled)
        trained.append(model())
        trainer = choros.Trainer(trained[-1], workers=workers, pool=pools(workers))
        run = trainer.fit(inputs, steps_per_epoch=6, epochs=2, batch_size=37, seed=1, verbose=0).run
        assert 0 <= run.waiting <= 1
        assert {worker.ahead for worker in run.workers} == {3}
        assert all(worker.decoding + worker.copying == pytest.approx(worker.waiting) for worker in run.workers)
    for a, b in zip(*(result.get_weights() for result in trained), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if kind == "arrays":
        plain = model()
        trainer = choros.Trainer(plain, workers=2, pool=pools(2))
        trainer.fit(x * 2, y, steps_per_epoch=6, epochs=2, batch_size=37, seed=1, verbose=0)
        for a, b in zip(plain.get_weights(), trained[0].get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_more_steps_than_batches_continue_with_the_next_pass(algorithm, pools):
    x, y = (array[:10] for array in rows())
    seen = choros.Trainer(model(), algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=4, steps_per_epoch=7, epochs=2, verbose=0
    )
    assert [worker.steps for worker in seen.run.workers] == [14, 14]
    assert seen.run.rows == 4 * 10 + 2 * 4  # four passes of 4, 4 and 2 rows, and two batches of the fifth
    assert len(seen.history["loss"]) == 2


def test_one_row_on_two_workers_trains_as_on_one(pools):
    x, y = (array[:1] for array in rows())
    plain, trained = model(), model()
    plain.fit(x, y, epochs=2, verbose=0)
    choros.Trainer(trained, "allreduce", workers=2, pool=pools(2)).fit(x, y, epochs=2, verbose=0)
    for a, b in zip(plain.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
