"""The measurements of a comparison, and the versioned JSON file that holds them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

SCHEMA = "choros-results"
VERSION = 2
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % quantiles for 1, 2 ... degrees
PLAIN = "plain fit"  # the result of model.fit without Choros


@dataclass(frozen=True)
class Run:
    """One training of one algorithm from one seed.

    Attributes:
        seed: int. Seed of the initial weights and of the order of rows.
        f1: float. F1 on the test rows, each class weighted by its rows; in [0, 1].
        accuracy: float. Fraction of the test rows that were classified correctly.
        seconds: float. Training time without start-up.
        startup: float. Seconds to start the processes, to import, and to compile.
        samples_per_second: float. Rows trained in a second by all workers.
        exchanges: int. Number of exchanges, summed over the workers.
        staleness: float. Merges of other workers since a worker last read the center variable; mean over the exchanges.
        exchanging, waiting: float. Shares (0 to 1) of the workers' training time, as in ``choros.RunRecord``, after the
            first epoch.
        losses: tuple of (seconds since the start of training, epoch, loss), one for each epoch.
        workers: tuple of dicts. Counters of each worker by name.
        accuracies: tuple of float. Accuracy on the test rows at the end of each epoch.
        sent: tuple of int. Bytes that all workers had exchanged at the end of each epoch.
        stale: tuple of int. At index s, the number of exchanges with staleness s; empty if synchronous.
        lanes: for each worker tuples (kind, begin, end) in seconds: what it did in the first second after the first
            epoch. "compute", "data", "exchange" or "wait"; later ones are painted over earlier ones.
    """

    seed: int
    f1: float = math.nan
    accuracy: float = math.nan
    seconds: float = math.nan
    startup: float = math.nan
    samples_per_second: float = math.nan
    exchanges: int = 0
    staleness: float = 0.0
    exchanging: float = 0.0
    waiting: float = 0.0
    losses: tuple[tuple[float, int, float], ...] = ()
    workers: tuple[dict[str, float], ...] = ()
    accuracies: tuple[float, ...] = ()
    sent: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()
    lanes: tuple[tuple[tuple[str, float, float], ...], ...] = ()

    def to_target(self, target: float) -> float:
        """Return the seconds of training to an accuracy, interpolated between two epochs; NaN if it was not reached.

        Example:
            >>> run = Run(0, losses=((1.0, 0, 0.9), (2.0, 1, 0.5)), accuracies=(0.8, 0.9))
            >>> round(run.to_target(0.85), 6), run.to_target(0.7), run.to_target(0.95)
            (1.5, 1.0, nan)
        """
        before: tuple[float, float] | None = None
        for (seconds, _, _), accuracy in zip(self.losses, self.accuracies, strict=False):
            if accuracy >= target:
                if before is None:
                    return seconds
                return before[0] + (seconds - before[0]) * (target - before[1]) / (accuracy - before[1])
            before = (seconds, accuracy)
        return math.nan

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the run that ``dataclasses.asdict`` wrote; ``None`` is read as NaN."""
        known = _known(cls, data)
        figures = ("f1", "accuracy", "seconds", "startup", "samples_per_second", "staleness", "exchanging", "waiting")
        for name in known.keys() & figures:
            known[name] = _number(known[name])
        losses = tuple((_number(t), int(epoch), _number(loss)) for t, epoch, loss in known.get("losses", ()))
        workers = tuple({str(k): _number(v) for k, v in worker.items()} for worker in known.get("workers", ()))
        accuracies = tuple(map(_number, known.get("accuracies", ())))
        lanes = tuple(
            tuple((str(kind), float(begin), float(end)) for kind, begin, end in lane) for lane in known.get("lanes", ())
        )
        counts = {name: tuple(map(int, known.get(name, ()))) for name in ("sent", "stale")}
        lists = {"losses": losses, "workers": workers, "accuracies": accuracies, "lanes": lanes}
        return cls(**{**known, **lists, **counts})


@dataclass(frozen=True)
class Result:
    """The result of one algorithm: one run for each seed, or the error that ended it.

    The values of a result (``f1``, ``seconds``, ...) are the means over its runs; NaN without runs.

    Attributes:
        algorithm: str. Name of the algorithm.
        mode: "sync", "async" or None. The mode of the algorithm.
        about: str. A description in one line.
        settings: dict. Its hyper-parameters as text.
        runs: tuple of ``Run``.
        error: str. The error, or ``""``.

    Example:
        >>> result = Result("EASGD", "sync", runs=(Run(0, f1=0.5), Run(1, f1=0.75)))
        >>> result.f1, result.spread("f1"), result.failed
        (0.625, (0.5, 0.75), False)
    """

    algorithm: str
    mode: str | None = "sync"
    about: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    error: str = ""

    @property
    def failed(self) -> bool:
        """True if the algorithm failed."""
        return bool(self.error)

    @property
    def f1(self) -> float:
        """The weighted F1, as a mean over the seeds."""
        return self.mean("f1")

    @property
    def seconds(self) -> float:
        """The training time in seconds without start-up, as a mean over the seeds."""
        return self.mean("seconds")

    def mean(self, name: str) -> float:
        """Return the mean of a field of ``Run`` over the runs; NaN without runs."""
        return fmean(getattr(run, name) for run in self.runs) if self.runs else math.nan

    def spread(self, name: str) -> tuple[float, float]:
        """Return the minimum and the maximum of a field of ``Run`` over the runs."""
        values = [getattr(run, name) for run in self.runs] or [math.nan]
        return min(values), max(values)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the result that ``dataclasses.asdict`` wrote."""
        known = _known(cls, data)
        return cls(**{**known, "runs": tuple(Run.from_dict(run) for run in known.get("runs", ()))})


@dataclass(frozen=True)
class Setting:
    """The head of the report: model, data and settings of a comparison. Empty text and zeros are not shown.

    ``target`` is the accuracy to which the times are measured. ``other_load`` is the number of cores that other
    programs used on average during the trainings.
    """

    dataset: str
    train_rows: int = 0
    test_rows: int = 0
    features: int = 0
    classes: tuple[str, ...] = ()
    network: str = ""
    optimizer: str = ""
    epochs: int = 0
    batch_size: int = 0
    workers: int = 0
    seeds: int = 1
    backend: str = ""
    cores: int = 0
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    notes: tuple[str, ...] = ()
    target: float = 0.0
    other_load: float = 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the setting that ``dataclasses.asdict`` wrote."""
        known = _known(cls, data)
        lists = {name: tuple(map(str, known.get(name, ()))) for name in ("classes", "notes")}
        return cls(**{**known, **lists})


@dataclass(frozen=True)
class Report:
    """A comparison: the setting, and one result for each algorithm in the order of the runs.

    Attributes:
        setting: Setting.
        results: tuple of ``Result``.
        interrupted: bool. True if the user interrupted the comparison. Defaults to False.
    """

    setting: Setting
    results: tuple[Result, ...] = ()
    interrupted: bool = False

    @property
    def plain(self) -> Result | None:
        """The result of plain ``fit``; None if it was not measured."""
        return next((r for r in self.results if r.algorithm == PLAIN and r.runs), None)

    @property
    def steady(self) -> bool:
        """True if the speeds can be compared. The first epoch includes compiling, so there must be two or more."""
        return self.setting.epochs != 1

    @property
    def best(self) -> str:
        """The name with the highest accuracy, if its 95 % interval lies above all others; else ``""``."""
        spans = {r.algorithm: self.accuracy_interval(r) for r in self.results if math.isfinite(r.mean("accuracy"))}
        return _apart(spans, highest=True, places=3)

    @property
    def fastest(self) -> str:
        """The name with the least seconds to the target, if its 95 % interval lies below all others; else ``""``.

        Ensemble is left out: each of its members sees only a part of the rows.
        """
        if not self.steady:
            return ""
        spans = {r.algorithm: interval(self.targets(r)) for r in self.results if r.runs and r.algorithm != "Ensemble"}
        return _apart({name: span for name, span in spans.items() if not math.isnan(span[0])}, highest=False, places=2)

    def targets(self, result: Result) -> list[float]:
        """Return the seconds to the target of each run; NaN where it was not reached."""
        return [run.to_target(self.setting.target) for run in result.runs]

    def accuracy_interval(self, result: Result) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy: that of the mean over the seeds, or the binomial one if wider."""
        accuracy, rows = result.mean("accuracy"), self.setting.test_rows
        low, high = interval([run.accuracy for run in result.runs])
        half = max(high - low, 0.0) / 2 if len(result.runs) > 1 else 0.0
        chance = 1.96 * math.sqrt(max(accuracy * (1 - accuracy), 0.0) / rows) if rows else math.inf
        return accuracy - max(half, chance), accuracy + max(half, chance)

    def gains(self, result: Result) -> list[float]:
        """Return for each common seed the seconds of plain ``fit`` to the target, divided by those of a result.

        With one epoch the list is empty; see ``steady``.

        Example:
            >>> slow, fast = (Run(0, losses=((s, 0, 1.0),), accuracies=(1.0,)) for s in (3.0, 2.0))
            >>> report = Report(Setting("x", target=0.9), (Result(PLAIN, runs=(slow,)), Result("AEASGD", runs=(fast,))))
            >>> report.gains(report.results[1])
            [1.5]
        """
        if not self.steady:
            return []
        target = self.setting.target
        plain = {run.seed: run.to_target(target) for run in self.plain.runs} if self.plain else {}
        return [plain[run.seed] / run.to_target(target) for run in result.runs if run.seed in plain]

    def gain_interval(self, result: Result) -> tuple[float, float]:
        """Return the 95 % interval of the geometric mean of ``gains``, from their logarithms: its ends are positive."""
        gains = self.gains(result)
        if not all(math.isfinite(gain) and gain > 0 for gain in gains):
            return math.nan, math.nan
        low, high = interval([math.log(gain) for gain in gains])
        return math.exp(low), math.exp(high)

    def gain_with_startup(self, result: Result) -> float:
        """Return the mean of plain ``fit``'s seconds with start-up, divided by that of a result; NaN without both."""
        if self.plain is None:
            return math.nan
        mine, plain = self.result_seconds(result), self.result_seconds(self.plain)
        return plain / mine if mine > 0 else math.nan

    def result_seconds(self, result: Result) -> float:
        """Return the mean seconds from the start to the target, start-up included."""
        return result.mean("startup") + _mean(self.targets(result))

    def speedup(self, result: Result) -> float:
        """Return the training time of Single divided by that of a result; NaN if one of them was not measured.

        NaN with one epoch too; see ``steady``.

        Example:
            >>> results = (Result("Single", runs=(Run(0, seconds=3.0),)), Result("AEASGD", runs=(Run(0, seconds=2.0),)))
            >>> Report(Setting("x"), results).speedup(results[1])
            1.5
        """
        single = next((r.seconds for r in self.results if r.algorithm == "Single"), math.nan)
        return single / result.seconds if result.seconds > 0 and self.steady else math.nan

    def ranked(self) -> list[Result]:
        """Return the results sorted by the seconds to the target; those that did not reach it follow, by accuracy.

        With one epoch the seconds include start-up; see ``steady``.
        """

        def place(result: Result) -> tuple[bool, float]:
            seconds = _mean(self.targets(result)) if self.steady else self.result_seconds(result)
            accuracy = result.mean("accuracy")
            if math.isfinite(seconds):
                return False, seconds
            return True, -accuracy if math.isfinite(accuracy) else math.inf

        return sorted(self.results, key=place)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types. Numbers that are not finite become ``None``."""
        body = {"schema": SCHEMA, "version": VERSION, "best": self.best, "fastest": self.fastest, **asdict(self)}
        plain: dict[str, Any] = _plain(body)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that ``to_dict`` wrote.

        Raises:
            ValueError: The dictionary is not a report, or a report of an unknown version.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"This is not a Choros report: its schema is {data.get('schema')!r}, not {SCHEMA!r}.")
        if data.get("version") != VERSION:
            raise ValueError(
                f"The report has version {data.get('version')!r}; this Choros reads version {VERSION}. "
                "Read it with the Choros that wrote it."
            )
        results = tuple(Result.from_dict(result) for result in data.get("results", ()))
        return cls(Setting.from_dict(data["setting"]), results, bool(data.get("interrupted", False)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by Student's t: (-inf, inf) for one value, NaN if a value is not finite.

    Example:
        >>> [round(end, 2) for end in interval([1.0, 2.0, 3.0])]
        [-0.48, 4.48]
    """
    if not values or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    if len(values) == 1:
        return -math.inf, math.inf
    factor = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 2.23
    mean, half = fmean(values), factor * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _apart(spans: Mapping[str, tuple[float, float]], highest: bool, places: int) -> str:
    """Return the name whose interval lies above (or below) all others; ``""`` if there is none, or no other.

    The ends are rounded to the ``places`` that tables show: intervals that look as if they touch do not lie apart.
    """
    sign = 1 if highest else -1
    signed = {name: sorted(round(sign * end, places) for end in span) for name, span in spans.items()}
    for name, (low, _) in signed.items():
        if len(signed) > 1 and all(low > high for other, (_, high) in signed.items() if other != name):
            return name
    return ""


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report as JSON, atomically.

    Args:
        report: Report.
        path: The file. An existing file is replaced.
    """
    target = Path(path)
    text = json.dumps(report.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report that ``save`` wrote.

    Args:
        path: The JSON file.

    Returns:
        The report, equal to the saved one.

    Raises:
        ValueError: The file is not JSON, no report, or has another version.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{os.fspath(path)} is not a Choros report: it holds a {type(data).__name__}.")
    return Report.from_dict(data)


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _number(value: Any) -> float:
    return math.nan if value is None else value


def _plain(value: object) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
