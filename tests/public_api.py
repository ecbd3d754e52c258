"""The public API as a user's script calls it. mypy and pyright check the types; no test runs this file."""

from __future__ import annotations

from typing import Any, assert_type

import keras
import numpy as np

import choros
import choros.hvd as hvd
from choros.errors import WorkerFailedError
from choros.training.history import History


def make_model() -> keras.Model:
    """Return a compiled model."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def train(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> list[float]:
    """Train by workers of this machine, and return the losses."""
    model = make_model()
    with choros.Trainer(model, choros.AEASGD(window=8), workers=2, devices="cpu", restarts=1) as trainer:
        history = trainer.fit(
            x,
            y,
            batch_size=64,
            epochs=2,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
            validation_data=(x, y),
            shuffle="batch",
            checkpoint=choros.Checkpoint("checkpoints", every="epoch"),
            resume=True,
        )
    assert_type(history, History)
    assert_type(history.run, choros.RunRecord)
    for worker in history.run.workers:
        print(worker.rank, worker.host)
    return history.history["loss"]


def train_on_hosts(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Train by ranks of two hosts, and report a failure."""
    trainer = choros.Trainer(make_model(), "allreduce", launcher=choros.Ssh("n1:2,n2:2"))
    try:
        return trainer.fit(x, y, epochs=1).run.seconds
    except WorkerFailedError as error:
        print(error.rank, error.host)
        raise


def train_as_with_horovod(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    """Train with a wrapped optimizer in the ranks of a job."""
    hvd.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), "mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_type(hvd.rank(), int)
