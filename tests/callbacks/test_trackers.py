"""Trackers of experiments see a Trainer's epochs by their callbacks. No server is reached."""

import importlib.util
import warnings

import numpy as np
import pytest

import choros

if missing := [name for name in ("mlflow", "wandb") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"{', '.join(missing)}: not installed", allow_module_level=True)
keras = pytest.importorskip("keras")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def one_layer():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
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
        history = choros.Trainer(one_layer(), pool=pool).fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == list(enumerate(history.history["loss"]))


def test_autologging_warns_once_that_it_logs_nothing(mlflow, pool):
    mlflow.keras.autolog()
    with pytest.warns(UserWarning, match=r"MlflowCallback\(\)\] within mlflow.start_run\(\)"):
        choros.Trainer(one_layer(), pool=pool).fit(X, Y, verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        choros.Trainer(one_layer(), pool=pool).fit(X, Y, verbose=0)
    assert not [warning for warning in caught if "autolog" in str(warning.message)]


def test_weights_and_biases_logs_every_epoch(pool, tmp_path, monkeypatch):
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=tmp_path, project="test") as run:
        callbacks = [WandbMetricsLogger()]
        history = choros.Trainer(one_layer(), pool=pool).fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
        assert run.summary["epoch/epoch"] == 1
        assert run.summary["epoch/loss"] == history.history["loss"][-1]
