"""Trackers of experiments see a Trainer's epochs by their callbacks, and tuners run its fits. No server is reached."""

import importlib.util
import pathlib
import re
import warnings

import numpy as np
import pytest

import choros

if missing := [name for name in ("mlflow", "wandb", "keras_tuner", "optuna") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"{', '.join(missing)}: not installed", allow_module_level=True)
keras = pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "trackers-and-tuners.md"
X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(units=8):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def pool():
    with choros.WorkerPool(2, echo=False) as pool:
        yield pool


@pytest.fixture
def mlflow(tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("test", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("test")
    yield mlflow
    mlflow.keras.autolog(disable=True)


def test_mlflows_callback_logs_every_epoch(mlflow, pool):
    with mlflow.start_run() as run:
        callback = mlflow.keras.MlflowCallback(log_every_epoch=True)
        history = choros.Trainer(make_model(), pool=pool).fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == list(enumerate(history.history["loss"]))


def test_autologging_warns_once_that_it_logs_nothing(mlflow, pool):
    mlflow.keras.autolog()
    with pytest.warns(UserWarning, match=r"MlflowCallback\(\)\] within mlflow.start_run\(\)"):
        choros.Trainer(make_model(), pool=pool).fit(X, Y, verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        choros.Trainer(make_model(), pool=pool).fit(X, Y, verbose=0)
    assert not [warning for warning in caught if "autolog" in str(warning.message)]


def test_weights_and_biases_logs_every_epoch(pool, tmp_path, monkeypatch):
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=tmp_path, project="test") as run:
        callbacks = [WandbMetricsLogger()]
        history = choros.Trainer(make_model(), pool=pool).fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
        assert run.summary["epoch/epoch"] == 1
        assert run.summary["epoch/loss"] == history.history["loss"][-1]


@pytest.mark.parametrize("tuner", ["KerasTuner", "Optuna"])
def test_a_tuner_runs_the_fits_of_the_page(tuner, pool, monkeypatch, tmp_path, capsys):
    block = re.search(rf"^<!-- not run: needs {tuner} -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[1]
    trainer, fits = choros.Trainer, []

    def shared(model, algorithm, workers):
        fits.append(workers)
        return trainer(model, algorithm, pool=pool)

    monkeypatch.setattr(choros, "Trainer", shared, raising=False)
    monkeypatch.chdir(tmp_path)
    names = {"choros": choros, "make_model": make_model, "x": X, "y": Y, "xv": X, "yv": Y}
    exec(compile(block, str(PAGE), "exec"), names)
    assert fits == [2, 2]
    assert re.search(r"\{'units': \d+\}", capsys.readouterr().out)
