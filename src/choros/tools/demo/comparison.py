"""Training of the network by each algorithm, and scores on the test rows."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Protocol

from choros.algorithms import Algorithm
from choros.algorithms import list_algorithms as described
from choros.cluster.hardware import usable_cores
from choros.tools.demo.datasets.common import Dataset
from choros.tools.demo.network import NETWORK, OPTIMIZER, build
from choros.tools.demo.plan import Plan
from choros.tools.demo.report import Report, Result, Run, Setting
from choros.types import Array

Progress = Callable[[int, float], None]
Train = Callable[[Algorithm, int, Progress], tuple[Run, Algorithm]]
_PACKAGES = {"jax": ("jax",), "torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


class Shows(Protocol):
    """The receiver of the progress of a comparison."""

    def begin(self, name: str, run: int) -> None:
        """Show the start of a run."""

    def epoch(self, epoch: int, loss: float) -> None:
        """Show the end of an epoch."""

    def end(self, result: Result) -> None:
        """Show the result of an algorithm."""

    def stop(self) -> None:
        """Handle an interrupt by the user."""


def compare(
    plan: Plan, setting: Setting, train: Train, display: Shows, told_to_stop: Callable[[], bool] = lambda: False
) -> Report:
    """Train by each algorithm from each seed.

    If an algorithm fails, its result contains the error, and the comparison continues. An interrupt ends the
    comparison; the measurements before it are kept.

    Args:
        plan: Plan.
        setting: Setting. The head of the report.
        train: a function of an algorithm, a seed and a function that receives the loss of each epoch. It returns the
            measurements and the algorithm with all settings.
        display: shows the progress.
        told_to_stop: returns whether the user has interrupted. Compiled code may convert an interrupt to another
            exception. By default it returns False.

    Returns:
        The report.
    """
    results: list[Result] = []
    for algorithm in plan.algorithms:
        name, runs, error = type(algorithm).__name__, list[Run](), ""
        used, interrupted = algorithm, False
        try:
            for number, seed in enumerate(plan.seeds):
                display.begin(name, number)
                run, used = train(algorithm, seed, display.epoch)
                runs.append(run)
        except KeyboardInterrupt:
            interrupted = True
            display.stop()
        except Exception as failure:
            interrupted = told_to_stop()
            error = "" if interrupted else f"{type(failure).__name__}: {failure}"
            if interrupted:
                display.stop()
        if runs or error:
            about = described()[name]
            results.append(Result(name, algorithm.mode, about, _settings(used), tuple(runs), error))
            if not interrupted:
                display.end(results[-1])
        if interrupted:
            return Report(setting, tuple(results), interrupted=True)
    return Report(setting, tuple(results))


def trainer(plan: Plan, data: Dataset, pool: Any) -> Train:
    """Return a function that trains and scores the network with the workers of a pool.

    Args:
        plan: Plan.
        data: Dataset.
        pool: ``choros.WorkerPool`` for all runs.
    """

    def train(algorithm: Algorithm, seed: int, progress: Progress) -> tuple[Run, Algorithm]:
        import keras

        from choros.trainer import Trainer

        class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
                progress(epoch, float((logs or {}).get("loss", float("nan"))))

        model = build(len(data.features), data.classes, seed)
        teacher = Trainer(model, algorithm, pool=pool)
        history = teacher.fit(
            data.x_train,
            data.y_train,
            epochs=plan.epochs,
            batch_size=plan.batch_size,
            verbose=0,
            seed=seed,
            callbacks=[Epochs()],
        )
        f1, accuracy = score(data.y_test, teacher.predict(data.x_test, batch_size=1024, verbose=0))
        record = history.run
        run = Run(
            seed=seed,
            f1=f1,
            accuracy=accuracy,
            seconds=record.seconds,
            startup=record.startup,
            samples_per_second=record.samples_per_second,
            exchanges=record.exchanges,
            staleness=record.staleness,
            exchanging=record.exchanging,
            waiting=record.waiting,
            losses=record.losses,
            workers=tuple(asdict(worker) for worker in record.workers),
        )
        return run, record.algorithm

    return train


def score(truth: Array, probabilities: Array) -> tuple[float, float]:
    """Return weighted F1 and accuracy of the most probable classes.

    Args:
        truth: class indices, shape (rows,).
        probabilities: shape (rows, classes).

    Example:
        >>> import numpy as np
        >>> score(np.array([0, 1]), np.array([[0.9, 0.1], [0.8, 0.2]]))
        (0.3333333333333333, 0.5)
    """
    from sklearn.metrics import accuracy_score, f1_score

    guess = probabilities.argmax(axis=1)
    return float(f1_score(truth, guess, average="weighted", zero_division=0)), float(accuracy_score(truth, guess))


def setting(plan: Plan, data: Dataset, dataset: str, classes: tuple[str, ...]) -> Setting:
    """Return the head of the report: model, data, machine, versions and date.

    Args:
        plan: Plan.
        data: Dataset.
        dataset: str. Name of the data in the report.
        classes: tuple of str. Names of its classes.
    """
    cores = len(usable_cores())
    threads = f"{plan.threads} thread{'s' * (plan.threads != 1)}" if plan.threads else "the threads of its environment"
    notes = (
        f"{plan.workers} workers, each a process with {threads}; Single is one of them. The process that started them "
        "waits meanwhile. Every algorithm has the same compiled optimizer and data and, but for Ensemble, whose "
        "members start apart, the same initial weights. Ensemble counts its averaged prediction.",
        "Start-up (processes, imports, compiling, the first step of each shape) is not part of the training time. "
        "Loss is that of training, with dropout, at the end of each epoch.",
    )
    return Setting(
        dataset=dataset,
        train_rows=len(data.x_train),
        test_rows=len(data.x_test),
        features=len(data.features),
        classes=classes,
        network=NETWORK,
        optimizer=OPTIMIZER,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        workers=plan.workers,
        seeds=len(plan.seeds),
        backend=plan.backend,
        cores=cores,
        machine=f"{platform.system()} {platform.machine()}",
        versions=_versions(plan.backend),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=notes,
    )


def describe(s: Setting) -> str:
    """Return the setting as two lines of text for the terminal."""
    return (
        f"{s.dataset}: {s.train_rows:,} rows to train on, {s.test_rows:,} held back, {s.features} features, "
        f"{len(s.classes)} classes\n"
        f"{s.workers} worker{'s' * (s.workers != 1)} on {s.backend}, {s.epochs} epoch{'s' * (s.epochs != 1)}, "
        f"global batch {s.batch_size}" + (f", {s.seeds} seeds" if s.seeds > 1 else "")
    )


def _settings(algorithm: Algorithm) -> dict[str, str]:
    if algorithm.mode is None:
        return {}
    return {field.name: repr(getattr(algorithm, field.name)) for field in fields(algorithm)}


def _versions(backend: str) -> dict[str, str]:
    environment = {"choros": _version("choros"), "python": platform.python_version(), "keras": _version("keras")}
    environment[backend] = next(filter(None, map(_version, _PACKAGES[backend])), "")
    environment["numpy"] = _version("numpy")
    return {name: version for name, version in environment.items() if version}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
