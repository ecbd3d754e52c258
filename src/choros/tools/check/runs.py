"""The runs of a check: in one process, with workers, and with workers after a resume."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.driver_model import build_model, check_target
from choros.data import Source, validation
from choros.data.conversion import as_arrays
from choros.data.tree import leaves, map_leaves
from choros.errors import InvalidInputError, WorkerFailedError
from choros.tools.check.model_state import Snapshot, batch_statistics, random_layers, switched_off
from choros.tools.check.reference_fit import Result, Setting, collect, differences, plain_fit
from choros.tools.check.report import Comparison, Difference
from choros.trainer import Trainer
from choros.training.executors.worker_pool import WorkerPool

if TYPE_CHECKING:
    import keras

__all__ = ["Runs", "Setting", "few_rows"]

_CHAOS = 1e-4  # largest effect of rounding on metrics; larger differences between runs have another cause
_SPREAD, _SEEDS = 3.0, 3  # factor of the largest difference between runs with other seeds, and number of these runs
_NARROW = 2e-2  # least tolerance of a model that computes in 16 bits
_BITS = 1e-7  # tolerance of a resumed run, which should have equal bits


class Runs:
    """The runs of one model from the same state.

    Args:
        model: a compiled model. It is built here, and its state is restored before each run and at the end.
        source: the rows, for the reference.
        setting: the rows and arguments, for workers.
        pool: the workers.
        notes: a list to which limits of the check are appended.

    Raises:
        InvalidInputError: the model cannot take the data.
    """

    def __init__(
        self, model: keras.Model, source: Source, setting: Setting, pool: WorkerPool, notes: list[str]
    ) -> None:
        self.model, self.source, self.pool, self.notes = model, source, pool, notes
        if any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers()):
            setting = replace(setting, tolerance=max(setting.tolerance, _NARROW))
            notes.append(f"the model computes in 16 bits: the tolerance is {setting.tolerance:g}.")
        self.setting = setting
        self.exact = setting.algorithm.level == "gradients"
        self.reason, self.measured = "", False
        self.spread: dict[Any, float] = {}
        self.noise: dict[Any, float] = {}
        if self.exact:
            self._without_randomness(model)
        sample = source.sample(min(setting.batch_size, 32))
        check_target(self.model, sample)
        build_model(self.model, sample)
        self.state = Snapshot(self.model)

    def compare(self, numbers: Sequence[int], resume: bool) -> list[Comparison]:
        """Run everything; return one comparison for each number of workers, and one for the resume."""
        try:
            return self._compare(numbers, resume)
        finally:
            self.state.restore()

    def _compare(self, numbers: Sequence[int], resume: bool) -> list[Comparison]:
        reference = self._plain(self.setting.seed)
        if self.exact and self.reason:
            self._measure(reference)
        results: dict[int, Result] = {}
        comparisons = []
        for number in numbers:
            judge = self._judge(reference, number)
            comparison, result = self._attempt(_count(number), "plain fit", partial(self._workers, number), judge)
            comparisons.append(comparison)
            if result is not None:
                results[number] = result
        several = [number for number in results if number > 1] or list(results)
        if resume and several:
            number = several[0]
            judge = self._judge_resume(results[number])
            resumed = partial(self._resumed, number)
            comparisons.append(self._attempt(f"{_count(number)}, resumed", _count(number), resumed, judge)[0])
        return comparisons

    def _without_randomness(self, model: keras.Model) -> None:
        """Use a copy of the model without randomness, or store the reason why runs of the model cannot be equal."""
        drawing = [layer.name for layer in random_layers(model)]
        normalising = [layer.name for layer in batch_statistics(model)]
        if not drawing and not normalising:
            return
        parts = [f"random layers ({', '.join(drawing)})"] if drawing else []
        parts += [f"batch statistics of each worker's rows ({', '.join(normalising)})"] if normalising else []
        try:
            copy = switched_off(model)
        except (InvalidInputError, TypeError, ValueError):  # the model cannot be copied; the workers report this
            copy = None
        if copy is not None:
            self.model = copy
            self.notes.append(f"compared with these switched off: {'; '.join(parts)}.")
            return
        self.reason = f"{'; '.join(parts)}: differs by numbers of workers, as it should."

    def _plain(self, seed: int, order: int | None = None) -> Result:
        self.state.restore()
        return plain_fit(self.model, self.source, self.setting, seed, order)

    def _measure(self, reference: Result) -> None:
        """Measure the effect of rounding on each variable. If the differences have another cause, vary the seed."""
        self.measured = True
        if not self.reason:
            noise = _distances(reference, self._plain(self.setting.seed, order=7))
            moved = max((value for (kind, _), value in noise.items() if kind == "metric"), default=0.0)
            if moved <= max(_CHAOS, self.setting.tolerance):  # metrics decide, as rounding alone may move weights far
                self.noise = noise
                return
            second_run = _distances(reference, self._plain(self.setting.seed))
            if max(second_run.values(), default=0.0) <= self.setting.tolerance:
                self.notes.append("the result depends on the order of the rows inside a batch.")
                return
            self.reason = "two runs of one process with one seed differ: something draws random numbers without a seed."
        for number in range(_SEEDS):
            apart = _distances(reference, self._plain(self.setting.seed + 1 + number))
            self.spread = {key: max(value, self.spread.get(key, 0.0)) for key, value in apart.items()}

    def _judge(self, reference: Result, number: int) -> Callable[[Result], tuple[str, tuple[Difference, ...], str]]:
        def judge(result: Result) -> tuple[str, tuple[Difference, ...], str]:
            if not self.exact:
                return _finite(result)
            differing = differences(reference, result, self.setting.tolerance, self.noise)
            if not self.measured and not all(difference.passed for difference in differing):
                self._measure(reference)
                return judge(result)
            if not self.reason or (number == 1 and all(difference.passed for difference in differing)):
                return _verdict(differing), differing, ""
            wide = {key: _SPREAD * value / 10 for key, value in self.spread.items()}
            loose = differences(reference, result, self.setting.tolerance, wide)
            return ("inexact" if all(difference.passed for difference in loose) else "differs"), loose, self.reason

        return judge

    def _judge_resume(self, whole: Result) -> Callable[[Result], tuple[str, tuple[Difference, ...], str]]:
        def judge(result: Result) -> tuple[str, tuple[Difference, ...], str]:
            if self.setting.algorithm.mode != "sync":
                return _finite(result)
            differing = differences(whole, result, _BITS, {})
            return _verdict(differing), differing, ""

        return judge

    def _attempt(self, run: str, reference: str, train: Callable[[], Result], judge: Any) -> tuple[Comparison, Any]:
        """Train, and return the comparison and the result. An error gives the verdict "refused" or "failed"."""
        begun = time.perf_counter()
        self.state.restore()
        try:
            result = train()
        except WorkerFailedError as error:
            message = f"rank {error.rank} on {error.host or 'this machine'}: {error}"
            seconds = time.perf_counter() - begun
            return Comparison(run, reference, "failed", (), type(error).__name__, message, seconds), None
        except InvalidInputError as error:
            seconds = time.perf_counter() - begun
            return Comparison(run, reference, "refused", (), type(error).__name__, str(error), seconds), None
        verdict, differing, message = judge(result)
        return Comparison(run, reference, verdict, differing, "", message, time.perf_counter() - begun), result

    def _workers(self, number: int, epochs: int = 0, **more: Any) -> Result:
        x, y, weight = self.setting.data
        trainer = Trainer(self.model, self.setting.algorithm, workers=number, pool=self.pool)
        history = trainer.fit(
            x,
            y,
            sample_weight=weight,
            batch_size=self.setting.batch_size,
            epochs=epochs or self.setting.epochs,
            seed=self.setting.seed,
            verbose=0,
            **self.setting.options,
            **more,
        ).history
        return collect(self.model), history

    def _resumed(self, number: int) -> Result:
        with tempfile.TemporaryDirectory(prefix="choros-check-") as folder:
            self._workers(number, epochs=self.setting.epochs - 1, checkpoint=folder)
            self.state.restore()
            with contextlib.redirect_stderr(io.StringIO()):  # the output names a folder that is deleted afterwards
                return self._workers(number, checkpoint=folder, resume=True)


def few_rows(
    x: object, y: object, sample_weight: object, batch_size: int | None, rows: int | None
) -> tuple[int, tuple[Any, Any, Any]]:
    """Return the batch size, and a selection of ``rows`` rows, spread evenly.

    Raises:
        InvalidDataError: the arrays do not fit together.
    """
    validation.check(x, y, sample_weight)
    parts = (as_arrays(x, "x"), as_arrays(y, "y"), as_arrays(sample_weight, "sample_weight"))
    count = len(next(leaves(parts[0], "x"))[1])
    size = batch_size or min(16, max(2, count // 2))
    wanted = min(count, rows or 4 * size + 2)
    picked = np.linspace(0, count - 1, wanted).astype(np.int64)
    x, y, sample_weight = (None if part is None else map_leaves(lambda leaf: leaf[picked], part) for part in parts)
    return size, (x, y, sample_weight)


def _distances(a: Result, b: Result) -> dict[Any, float]:
    return {(difference.kind, difference.name): difference.largest for difference in differences(a, b, 0.0, {})}


def _verdict(found: tuple[Difference, ...]) -> str:
    return "equal" if all(difference.passed for difference in found) else "differs"


def _finite(result: Result) -> tuple[str, tuple[Difference, ...], str]:
    wrong = [
        Difference(kind, name, float("inf"), 0.0, "not finite", float("nan"), float("nan"))
        for (kind, name), array in [*result[0].items(), *((("metric", k), np.asarray(v)) for k, v in result[1].items())]
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all()
    ]
    return ("differs" if wrong else "trained"), tuple(wrong), ""


def _count(number: int) -> str:
    return f"{number} worker{'s' * (number > 1)}"
