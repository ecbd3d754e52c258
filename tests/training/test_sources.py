"""Training from what is not arrays: files that the workers read themselves."""

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

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
    given = dict(epochs=3, batch_size=37, seed=2, verbose=0, validation_data=valid)
    return trained, trainer.fit(data, **given | more).history


@pytest.mark.parametrize("class_weight", [None, {1: 4.0}])
def test_rows_of_files_train_exactly_for_any_number_of_workers(folder, pools, class_weight):
    (one, alone), (two, together) = (fit(folder, pools(n), n, class_weight=class_weight) for n in (1, 2))
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, values in alone.items():
        np.testing.assert_allclose(values, together[name], rtol=1e-6, err_msg=name)
    columns = {
        name: np.array(rows) for name, rows in pa.parquet.read_table(folder / "valid.parquet").to_pydict().items()
    }
    loss, _ = two.evaluate(np.stack([columns[name] for name in "abcd"], 1), columns["label"], verbose=0)
    np.testing.assert_allclose(loss, together["val_loss"][-1], rtol=1e-5)


def test_what_decode_raises_in_a_worker_is_told(folder, pools):
    def decode(columns):
        if len(columns["a"]) < 30:
            raise ValueError("these rows are bad")
        return columns

    data = choros.files(folder / "train.parquet", y="label", decode=decode)
    with pytest.raises(choros.WorkerFailed, match="these rows are bad"):
        choros.Trainer(model(), workers=2, pool=pools(2)).fit(data, verbose=0)


def test_targets_beside_files_and_a_split_of_them_are_refused(folder):
    data = choros.files(folder / "train.parquet", y="label")
    with pytest.raises(choros.BadInput, match="y was given beside a FileSource"):
        choros.Trainer(model()).fit(data, np.zeros(400))
    with pytest.raises(choros.BadInput, match="validation_split cannot cut a FileSource"):
        choros.Trainer(model()).fit(data, validation_split=0.2)


def test_ranks_of_a_job_decode_together(folder, tmp_path):
    script = """
        import os, sys
        if os.environ["KERAS_BACKEND"] != "tensorflow":
            sys.modules["tensorflow"] = None
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
