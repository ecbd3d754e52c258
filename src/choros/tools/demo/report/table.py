"""The table of a comparison. The terminal and the HTML page share its columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from choros.tools.demo.report.results import Report, Result

_NONE = "–"  # a cell without a value


@dataclass(frozen=True)
class Column:
    """A column: its title, minimum width, a function that formats its cells, and its meaning.

    ``steady`` columns are about training without start-up, which one epoch alone does not show.
    """

    title: str
    width: int
    show: Callable[[Report, Result], str]
    meaning: str
    steady: bool = False


def decimal(value: float, places: int) -> str:
    """Format a number; return a dash if it is not finite.

    Example:
        >>> decimal(1234.5, 1), decimal(float("nan"), 1)
        ('1,234.5', '–')
    """
    return f"{value:,.{places}f}" if math.isfinite(value) else _NONE


def percent(share: float) -> str:
    """Format a fraction as a percentage; return a dash if it is not finite.

    Example:
        >>> percent(0.0123), percent(0)
        ('1.2 %', '0 %')
    """
    if not math.isfinite(share):
        return _NONE
    return "0 %" if share == 0 else f"{100 * share:.1f} %"


def _target(report: Report, result: Result) -> str:
    """Return the mean seconds to the target, or in how many runs it was not reached."""
    times = report.targets(result)
    missed = sum(not math.isfinite(time) for time in times)
    if missed == len(times):
        return "not reached"
    return f"not in {missed} of {len(times)}" if missed else decimal(sum(times) / len(times), 2)


def mean_gain(report: Report, result: Result) -> float:
    """Return the geometric mean of the speed-ups against plain ``fit``; NaN if one of them missed the target."""
    gains = report.gains(result)
    return math.prod(gains) ** (1 / len(gains)) if gains else math.nan


def span_text(span: tuple[float, float]) -> str:
    """Format an interval; return a dash if it is not finite.

    Example:
        >>> span_text((1.5, 2.25)), span_text((-math.inf, math.inf))
        ('1.50 to 2.25', '–')
    """
    return f"{span[0]:.2f} to {span[1]:.2f}" if all(map(math.isfinite, span)) else _NONE


def _accuracy(report: Report, result: Result) -> str:
    low, high = report.accuracy_interval(result)
    half = f" ±{(high - low) / 2:.3f}" if math.isfinite(high - low) else ""
    return decimal(result.mean("accuracy"), 3) + half


def _megabytes(result: Result) -> float:
    return sum(run.sent[-1] for run in result.runs if run.sent) / max(len(result.runs), 1) / 1e6


COLUMNS = (
    Column("to target s", 11, _target, "seconds of training to the target accuracy, without start-up", steady=True),
    Column(
        "x fit",
        5,
        lambda report, r: decimal(mean_gain(report, r), 2),
        "plain fit's seconds to the target, divided by those of this algorithm",
    ),
    Column(
        "95 % interval", 13, lambda report, r: span_text(report.gain_interval(r)), "interval of x fit over the seeds"
    ),
    Column(
        "start-up s",
        10,
        lambda _, r: decimal(r.mean("startup"), 1),
        "seconds to start processes, import and compile",
        steady=True,
    ),
    Column(
        "result s", 8, lambda report, r: decimal(report.result_seconds(r), 1), "start-up and training to the target"
    ),
    Column(
        "accuracy", 12, _accuracy, "share of the rows held back that is classified correctly, with its 95 % interval"
    ),
    Column("F1", 6, lambda _, r: decimal(r.f1, 4), "weighted F1 on these rows"),
)
WORK = (
    Column(
        "train s",
        7,
        lambda _, r: decimal(r.seconds, 2),
        "seconds for all epochs, without start-up",
        steady=True,
    ),
    Column(
        "x Single",
        8,
        lambda report, r: decimal(report.speedup(r), 2),
        "Single's seconds for all epochs, divided by those of this algorithm",
    ),
    Column(
        "samples/s",
        9,
        lambda _, r: decimal(r.mean("samples_per_second"), 0),
        "rows trained a second, all workers",
        steady=True,
    ),
    Column("exchanges", 9, lambda _, r: decimal(r.mean("exchanges"), 0), "exchanges, summed over the workers"),
    Column("MB", 7, lambda _, r: decimal(_megabytes(r), 1), "megabytes that the workers exchanged, summed over them"),
    Column("staleness", 9, lambda _, r: decimal(r.mean("staleness"), 2), "merges by others since the last exchange"),
    Column(
        "exchanging",
        10,
        lambda _, r: percent(r.mean("exchanging")),
        "share of the training time in exchanges",
        steady=True,
    ),
    Column(
        "waiting",
        7,
        lambda _, r: percent(r.mean("waiting")),
        "share of the training time waiting for data",
        steady=True,
    ),
)


def with_values(report: Report, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return the columns with a value. Without Single there is no speed relative to it; one seed gives no interval."""
    columns = tuple(column for column in columns if report.steady or not column.steady)
    measured = [result for result in report.results if result.runs]
    return tuple(c for c in columns if not measured or any(c.show(report, result) != _NONE for result in measured))


def marks(report: Report, result: Result) -> str:
    """Return "most accurate", "fastest", both or neither; a mark means that 95 % intervals do not overlap."""
    titles = (("most accurate", report.best), ("fastest", report.fastest))
    return ", ".join(title for title, name in titles if result.algorithm == name)


def summary(error: str, limit: int = 160) -> str:
    r"""Return the first line of an error, cut to ``limit`` characters.

    Example:
        >>> summary("WorkerFailedError: rank 1 was killed.\nIts output: ...")
        'WorkerFailedError: rank 1 was killed.'
    """
    first_line = error.strip().split("\n", 1)[0].strip()
    return first_line if len(first_line) <= limit else first_line[: limit - 1].rstrip() + "…"


def text_table(report: Report) -> str:
    """Return the comparison as two tables of text for a terminal, sorted by the seconds to the target.

    Args:
        report: Report.

    Returns:
        Text without a final newline. A failed algorithm has a line with its error, in the first table.

    Example:
        >>> from choros.tools.demo.report.results import Run, Setting
        >>> print(text_table(Report(Setting("x"), (Result("Single", None, error="InvalidDataError: no rows"),))))
        algorithm  to target s  x fit  95 % interval  start-up s  result s      accuracy      F1
        ---------  -----------  -----  -------------  ----------  --------  ------------  ------
        Single     failed: InvalidDataError: no rows
    """
    lines = _lines(report, with_values(report, COLUMNS), first=True)
    if any(result.runs for result in report.results):
        lines += ["", *_lines(report, with_values(report, WORK), first=False)]
    return "\n".join(lines)


def _lines(report: Report, columns: tuple[Column, ...], first: bool) -> list[str]:
    """Return the lines of one table; marks and errors are in the first."""
    name_width = max([len("algorithm"), *(len(r.algorithm) for r in report.results)])
    shown = [(r, [c.show(report, r) for c in columns]) for r in report.ranked()]
    widths = [max([c.width, *(len(cells[i]) for r, cells in shown if r.runs)]) for i, c in enumerate(columns)]

    def row_text(name: str, cells: list[str], mark: str = "") -> str:
        parts = [name.ljust(name_width), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))]
        return "  ".join(parts) + (f"  <- {mark}" if mark else "")

    lines = [row_text("algorithm", [c.title for c in columns]), row_text("-" * name_width, ["-" * w for w in widths])]
    for result, cells in shown:
        if result.runs:
            lines.append(row_text(result.algorithm, cells, marks(report, result) if first else ""))
        if result.failed and first:
            lines.append(f"{result.algorithm.ljust(name_width)}  failed: {summary(result.error)}")
    return lines
