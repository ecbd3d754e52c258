"""Training of the network by plain ``fit`` and by each algorithm, and scores on the test rows."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from choros.algorithms import Algorithm
from choros.algorithms import list_algorithms as described
from choros.cluster.hardware import usable_cores, version
from choros.tools.demo.baseline import PlainFit
from choros.tools.demo.datasets.common import Dataset
from choros.tools.demo.measurement import read_timeline, steady
from choros.tools.demo.network import CNN, NETWORK, OPTIMIZER, build_for, restart
from choros.tools.demo.plan import Plan
from choros.tools.demo.report import Report, Result, Run, Setting
from choros.tools.demo.report.results import PLAIN
from choros.types import Array

Progress = Callable[[int, float], None]
Train = Callable[[Algorithm, int, Progress], tuple[Run, Algorithm]]
TrainPlain = Callable[[int, Progress], Run]
_PLAIN_ABOUT = "model.fit of Keras without Choros: one process with the threads that Keras takes, on all cores."


class ProgressReceiver(Protocol):
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
    plan: Plan,
    setting: Setting,
    train: Train,
    display: ProgressReceiver,
    was_interrupted: Callable[[], bool] = lambda: False,
    plain: TrainPlain | None = None,
) -> Report:
    """Train by plain ``fit`` and by each algorithm, from each seed.

    If an algorithm fails, its result contains the error, and the comparison continues. An interrupt ends the
    comparison; the measurements before it are kept.

    Args:
        plan: Plan.
        setting: Setting. The head of the report.
        train: a function that trains. It takes an algorithm, a seed and a receiver of the loss of each epoch, and
            returns the measurements and the algorithm with all its settings.
        display: shows the progress.
        was_interrupted: a function that returns whether the user has interrupted. It is called after an exception,
            because compiled code may convert an interrupt to another one.
        plain: a function that trains by plain ``fit``. It takes a seed and a receiver of the loss of each epoch.
            Defaults to None: no baseline.

    Returns:
        The report.
    """
    results: list[Result] = []
    for algorithm in (() if plain is None else (None,)) + plan.algorithms:
        name = PLAIN if algorithm is None else type(algorithm).__name__
        runs, error = list[Run](), ""
        used, interrupted = algorithm, False
        try:
            for number, seed in enumerate(plan.seeds):
                display.begin(name, number)
                if algorithm is not None:
                    run, used = train(algorithm, seed, display.epoch)
                else:
                    assert plain is not None  # noqa: S101 - there is no other reason for None
                    run = plain(seed, display.epoch)
                # Only the first run compiles: the start-up of the others would be too short.
                runs.append(replace(run, startup=runs[0].startup) if runs else run)
        except KeyboardInterrupt:
            interrupted = True
            display.stop()
        except Exception as failure:
            interrupted = was_interrupted()
            error = "" if interrupted else f"{type(failure).__name__}: {failure}"
            if interrupted:
                display.stop()
        if runs or error:
            about = _PLAIN_ABOUT if algorithm is None else described()[name]
            mode, settings = (None, {}) if used is None or algorithm is None else (algorithm.mode, _settings(used))
            results.append(Result(name, mode, about, settings, tuple(runs), error))
            if not interrupted:
                display.end(results[-1])
        if interrupted:
            return Report(setting, tuple(results), interrupted=True)
    return Report(setting, tuple(results))


def plain_trainer(plan: Plan, data: Dataset, environment: Mapping[str, str]) -> TrainPlain:
    """Return a function that trains and scores the network by plain ``fit``.

    Its process starts with the first seed and ends with the last, so that it takes no time from the workers.

    Args:
        plan: Plan.
        data: Dataset.
        environment: the environment variables of the process, without limits of threads.
    """
    open_process: list[PlainFit] = []

    def train(seed: int, progress: Progress) -> Run:
        if not open_process:
            open_process.append(PlainFit(data, environment))
        baseline, rows = open_process[0], _validation(data)
        last = seed == plan.seeds[-1]
        try:
            model = build_for(data.x_train.shape[1:], data.classes, seed)
            answer, predictions = baseline.train(model, seed, plan.epochs, plan.batch_size, rows, progress)
        except BaseException:
            last = True
            raise
        finally:
            if last:
                baseline.close()
        return _run(plan, data, seed, answer, predictions, baseline.startup + answer["startup"])

    return train


def trainer(plan: Plan, data: Dataset, pool: Any) -> Train:
    """Return a function that trains and scores the network with the workers of a pool.

    The first call starts the processes, which counts as start-up of every algorithm.

    Args:
        plan: Plan.
        data: Dataset.
        pool: ``choros.WorkerPool`` for all runs.
    """
    processes: list[float] = []
    models: dict[str, Any] = {}  # that of the last algorithm

    def train(algorithm: Algorithm, seed: int, progress: Progress) -> tuple[Run, Algorithm]:
        import keras

        from choros.trainer import Trainer

        class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
                progress(epoch, float((logs or {}).get("loss", float("nan"))))

        if not processes:
            processes.append(_start(pool))
        name = type(algorithm).__name__
        if name in models:
            restart(models[name], seed)
        else:
            models.clear()
            models[name] = build_for(data.x_train.shape[1:], data.classes, seed)
        with tempfile.TemporaryDirectory(prefix="choros-demo-") as folder:
            path = Path(folder) / "timeline.json"
            teacher = Trainer(models[name], algorithm, pool=pool, timeline=path)
            history = teacher.fit(
                data.x_train,
                data.y_train,
                epochs=plan.epochs,
                batch_size=plan.batch_size,
                validation_data=(data.x_test, data.y_test),
                validation_batch_size=_validation(data),
                verbose=0,
                seed=seed,
                callbacks=[Epochs()],
            )
            timeline = read_timeline(path, plan.epochs, algorithm.mode == "async")
        record = history.run
        answer = {
            "times": [seconds for seconds, _, _ in record.losses],
            "losses": [loss for _, _, loss in record.losses],
            "accuracies": history.history["val_accuracy"],
        }
        predictions = teacher.predict(data.x_test, batch_size=1024, verbose=0)
        run = replace(
            _run(plan, data, seed, answer, predictions, processes[0] + record.startup),
            exchanges=record.exchanges,
            staleness=record.staleness,
            exchanging=timeline.exchanging,
            waiting=timeline.waiting,
            workers=tuple(asdict(worker) for worker in record.workers),
            sent=timeline.sent,
            stale=timeline.staleness,
            lanes=timeline.lanes if seed == plan.seeds[0] else (),
        )
        return run, record.algorithm

    return train


def _start(pool: Any) -> float:
    """Start the processes of a pool and import what training needs; return the seconds that this took."""
    import keras
    import numpy as np

    from choros.algorithms import LocalSGD
    from choros.trainer import Trainer

    begun = time.perf_counter()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = np.zeros((pool.size, 1), "float32")
    Trainer(model, LocalSGD(), pool=pool).fit(rows, rows, batch_size=pool.size, verbose=0)
    return time.perf_counter() - begun


def _validation(data: Dataset) -> int:
    """Return the rows of a batch of the validation: all of a small test set."""
    return min(len(data.x_test), 1024)


def _run(plan: Plan, data: Dataset, seed: int, answer: Mapping[str, Any], predictions: Array, startup: float) -> Run:
    """Return the run with these times, losses and accuracies of its epochs.

    The seconds by which its first epoch took longer than the median of the others are added to the start-up.
    """
    times, extra = steady(answer["times"])
    f1, accuracy = score(data.y_test, predictions)
    return Run(
        seed=seed,
        f1=f1,
        accuracy=accuracy,
        seconds=times[-1],
        startup=startup + extra,
        samples_per_second=len(times) * len(data.x_train) / max(times[-1], 1e-9),
        losses=tuple(
            (time, epoch, loss) for epoch, (time, loss) in enumerate(zip(times, answer["losses"], strict=True))
        ),
        accuracies=tuple(answer["accuracies"]),
    )


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
    # scikit-learn annotates zero_division by its default, "warn".
    f1 = f1_score(truth, guess, average="weighted", zero_division=0)  # pyright: ignore[reportArgumentType]
    return float(f1), float(accuracy_score(truth, guess))


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
    count = f"{plan.workers} worker{'s' * (plan.workers != 1)}"
    notes = (
        "Plain fit is model.fit of Keras in one process without Choros, on all cores, with the threads that Keras "
        f"takes. The algorithms have {count}, each a process with {threads}; Single is one of them. All have the "
        "same compiled optimizer, data and global batch and, except for Ensemble, whose members start apart, the "
        "same initial weights. F1 and accuracy of Ensemble are those of its averaged prediction; its seconds to "
        "the target are those of its best member.",
        "Start-up is the time to start processes, to import and to compile. The workers were started once; this "
        "time is in the start-up of each algorithm. Only the first seed compiles: start-up is measured once. The time "
        "by which its first epoch took longer than the median epoch counts as compiling, for plain fit and all "
        "algorithms alike. Times include a validation after each "
        "epoch. The seconds to the target are interpolated between epochs.",
        "Intervals are 95 % intervals: of the mean over the seeds (Student's t); for accuracies the wider of this "
        "and the binomial interval of the test rows. A mark is given only where the intervals do not overlap.",
    )
    return Setting(
        dataset=dataset,
        train_rows=len(data.x_train),
        test_rows=len(data.x_test),
        features=len(data.features),
        classes=classes,
        network=NETWORK if data.x_train.ndim == 2 else CNN,
        optimizer=OPTIMIZER,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        workers=plan.workers,
        seeds=len(plan.seeds),
        target=plan.target,
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
    versions = {"choros": version("choros"), "python": platform.python_version()}
    versions |= {name: version(name) for name in ("keras", backend, "numpy")}
    return {name: text for name, text in versions.items() if text}
