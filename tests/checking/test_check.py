"""choros.check and the command: verdicts, refusals by name, failures with their rank, exit codes, rows drawn."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import keras
import numpy as np
import pytest

import choros
from choros.cli import main
from choros.errors import InvalidDataError, InvalidInputError
from choros.tools.check import CheckReport, load_model, made_rows
from choros.tools.check.reference_fit import differences


@pytest.fixture
def make():
    def make(loss="mse", *more):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), *more, keras.layers.Dense(1)])
        model.compile("adam", loss, metrics=["mae"])
        return model

    return make


@pytest.fixture
def rows():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def test_workers_and_a_resumed_run_equal_plain_fit_and_the_model_is_as_before(make, rows, pools):
    model = make()
    before = model.get_weights()
    report = choros.check(model, *rows, workers=(1, 3), pool=pools(3))
    assert [(each.run, each.reference, each.verdict) for each in report.comparisons] == [
        ("1 worker", "plain fit", "equal"),
        ("3 workers", "plain fit", "equal"),
        ("3 workers, resumed", "3 workers", "equal"),
    ]
    assert report.passed
    assert report.exit_code == 0
    names = {(each.kind, each.name) for each in report.comparisons[1].differences}
    assert {("metric", "loss"), ("metric", "mae"), ("weight", f"{model.name}/{model.layers[0].name}/kernel")} <= names
    assert any(kind == "optimizer" for kind, _ in names)
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == "equal"
    for value, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    assert not any(np.asarray(keras.ops.convert_to_numpy(v)).any() for v in model.optimizer.variables[2:])


def test_a_refusal_is_a_verdict_with_its_name(make, rows, pools):
    def mixed(y_true, y_pred):
        return keras.ops.mean(y_true * y_pred) ** 2

    report = choros.check(make(mixed), *rows, workers=(2,), pool=pools(3))
    (each,) = report.comparisons
    assert (each.verdict, each.error, report.exit_code) == ("refused", "InexactLossError", 3)
    assert "mixed" in str(report)
    twice = CheckReport("m", "jax", "AllReduce", 50, 16, 2, (each, replace(each, run="3 workers")))
    assert str(twice).count("'mixed'") == 1
    assert "2 workers, 3 workers: InexactLossError" in str(twice)


def test_a_sum_and_a_lambda_are_named_with_the_remedy(make, rows, pools):
    report = choros.check(make(lambda y, p: keras.ops.sum((y - p) ** 2)), *rows, workers=(2,), pool=pools(3))
    (each,) = report.comparisons
    assert "the lambda in test_check.py, line" in each.message
    assert "reduction='sum'" in each.message


def test_a_layer_that_mixes_rows_is_named(rows, pools):
    class Centers(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0, keepdims=True)

    model = keras.Sequential([keras.Input((4,)), Centers(name="centers"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    report = choros.check(model, *rows, workers=(2,), pool=pools(3))
    assert "whose layers 'centers' (Centers) may mix rows" in report.comparisons[0].message


def test_what_differs_is_found_and_said_where(make, rows, pools, monkeypatch):
    """Workers that train with another rate than the reference."""
    import choros.tools.check.runs as runs

    plain = runs.plain_fit

    def other_rate(model, *args):
        model.optimizer.learning_rate = 1e-2
        return plain(model, *args)

    monkeypatch.setattr(runs, "plain_fit", other_rate)
    report = choros.check(make(), *rows, workers=(2,), resume=False, pool=pools(3))
    (each,) = report.comparisons
    assert (report.verdict, report.exit_code) == ("differs", 1)
    wrong = [d for d in each.differences if not d.passed]
    assert {"weight", "metric"} <= {d.kind for d in wrong}
    assert all(d.largest > d.tolerance and d.where for d in wrong)
    assert "became" in report.table()


def test_a_worker_that_fails_is_named(rows, pools):
    class Fails(keras.layers.Layer):
        def call(self, x):
            if os.environ.get("CHOROS_WORKER"):
                raise RuntimeError("only in a worker")
            return x

    model = keras.Sequential([keras.Input((4,)), Fails(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    report = choros.check(model, *rows, workers=(2,), pool=pools(3))
    (each,) = report.comparisons
    assert (each.verdict, each.error, report.exit_code) == ("failed", "WorkerFailedError", 1)
    assert "rank " in each.message
    assert "only in a worker" in each.message


def test_dropout_and_batch_normalisation_are_switched_off_in_a_copy(make, rows, pools):
    model = make("mse", keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    report = choros.check(model, *rows, workers=(2,), resume=False, pool=pools(3))
    assert report.verdict == "equal"
    assert "dropout" in report.notes[0]
    assert "batch_normalization" in report.notes[0]
    assert model.layers[1].trainable
    assert model.layers[2].rate == 0.3


def test_another_algorithm_is_trained_and_not_compared(make, rows, pools):
    report = choros.check(make(), *rows, algorithm="localsgd", workers=(2,), pool=pools(3))
    assert [each.verdict for each in report.comparisons] == ["trained", "equal"]


def test_numbers_that_are_not_finite_differ():
    nan = float("nan")
    for expected, result in ((1.0, nan), (nan, 1.0), (1.0, float("inf"))):
        (each,) = differences(({}, {"loss": [expected]}), ({}, {"loss": [result]}), 1e-5, {})
        assert not each.passed
    (each,) = differences(({}, {"loss": [nan]}), ({}, {"loss": [nan]}), 1e-5, {})
    assert each.passed
    extra = differences(({}, {"loss": [1.0]}), ({}, {"loss": [1.0], "more": [1.0]}), 1e-5, {})
    assert [each.passed for each in extra] == [True, False]


def test_arguments_that_cannot_work(make, rows):
    for how in ({"workers": ()}, {"workers": (0,)}, {"epochs": 1}, {"algorithm": "allreduse"}, {"verbose": 1}):
        with pytest.raises(InvalidInputError):
            choros.check(make(), *rows, **how)
    with pytest.raises(InvalidInputError, match="several times"):
        choros.check(make(), (row for row in rows))
    with pytest.raises(InvalidDataError, match="rows"):
        choros.check(make(), rows[0], rows[1][:20])


def test_a_dataset_brings_its_own_batches(make, rows, pools):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return rows[0][index * 7 : index * 7 + 7], rows[1][index * 7 : index * 7 + 7]

    report = choros.check(make(), Batches(), workers=(2,), resume=False, pool=pools(3))
    assert report.passed
    assert "AllReduce: 2 epochs, batches of the data set" in report.table()


def test_rows_are_drawn_by_inputs_outputs_and_losses():
    text, size = keras.Input((None,), dtype="int32"), keras.Input((3,))
    x = keras.layers.concatenate([keras.layers.GRU(2)(keras.layers.Embedding(9, 3)(text)), size])
    model = keras.Model(
        [text, size], {"a": keras.layers.Dense(4, "softmax", name="a")(x), "b": keras.layers.Dense(1)(x)}
    )
    model.compile("sgd", {"a": "sparse_categorical_crossentropy", "b": "mse"})
    (message, sizes), targets = made_rows(model, 20)
    assert message.shape == (20, 8)
    assert message.max() < 9
    assert sizes.shape == (20, 3)
    assert set(np.unique(targets["a"])) <= set(range(4))
    assert targets["a"].shape == (20,)
    assert targets["b"].shape == (20, 1)


MODEL = """
import keras
def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense({units})])
    model.compile("sgd", {loss!r})
    return model
"""


def test_a_file_with_a_builder_or_with_data(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(units=1, loss="mse") + "def data():\n    return [1, 2], [3, 4]\n")
    model, data = load_model(file)
    assert model.compiled
    assert data == ([1, 2], [3, 4])
    file.write_text("x = 1\n")
    with pytest.raises(InvalidInputError, match="model.*__main__"):
        load_model(file)
    assert main(["check", str(tmp_path / "none.py")]) == 2


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("keras.Sequential([keras.layers.Dense(1)])", "add keras.Input(...) as the first layer, or define x and y"),
        ("Own()", "no rows can be drawn: define x and y"),
    ],
)
def test_a_model_without_inputs_needs_data(tmp_path, capsys, model, remedy):
    file = tmp_path / "model.py"
    file.write_text(
        "import keras\n"
        "class Own(keras.Model):\n"
        "    def call(self, x):\n"
        "        return x\n"
        f"model = {model}\n"
        'model.compile("sgd", "mse")\n'
    )
    assert main(["check", str(file)]) == 2
    err = capsys.readouterr().err
    assert remedy in err
    assert "Traceback" not in err


def test_a_file_that_cannot_define_a_model_is_not_run(tmp_path, capsys):
    """It may be a script that trains for hours."""
    file, ran = tmp_path / "train.py", tmp_path / "ran"
    file.write_text(f"import pathlib\nnetwork = 1\npathlib.Path({str(ran)!r}).touch()\n")
    assert main(["check", str(file)]) == 2
    assert "defines no `model`" in capsys.readouterr().err
    assert not ran.exists()
    file.write_text(f"import pathlib\nglobals()['model'] = None\npathlib.Path({str(ran)!r}).touch()\n")
    assert main(["check", str(file)]) == 2
    assert ran.exists()


def test_the_command_prints_the_table_and_ends_with_the_verdict(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(units=1, loss="mse"))
    command = [sys.executable, "-m", "choros", "check", str(file), "--workers", "2", "--batch-size", "8", "--variables"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    for message in ("2 workers, resumed", "Verdict: equal", "drawn at random", "2 of 2 weights", "dense/kernel"):
        assert message in done.stdout
    assert "choros-check-" not in done.stdout + done.stderr  # a folder that is gone
