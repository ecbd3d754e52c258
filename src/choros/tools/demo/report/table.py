"""The table of a comparison. The terminal and the HTML page share its columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from choros.tools.demo.report.results import Report, Result


@dataclass(frozen=True)
class Column:
    """A column: its title, minimum width, a function that formats its cells, and its meaning."""

    title: str
    width: int
    show: Callable[[Report, Result], str]
    meaning: str


def decimal(value: float, places: int) -> str:
    """Format a number; return a dash if it is not finite.

    Example:
        >>> decimal(1234.5, 1), decimal(float("nan"), 1)
        ('1,234.5', '–')
    """
    return f"{value:,.{places}f}" if math.isfinite(value) else "–"


def percent(share: float) -> str:
    """Format a fraction as a percentage; return a dash if it is not finite.

    Example:
        >>> percent(0.0123), percent(0)
        ('1.2 %', '0 %')
    """
    if not math.isfinite(share):
        return "–"
    return "0 %" if share == 0 else f"{100 * share:.1f} %"


COLUMNS = (
    Column("F1", 6, lambda _, r: decimal(r.f1, 4), "weighted F1 on the rows held back"),
    Column("accuracy", 8, lambda _, r: decimal(r.mean("accuracy"), 4), "share classified correctly of these rows"),
    Column("train s", 7, lambda _, r: decimal(r.seconds, 2), "seconds to train, without start-up"),
    Column("x Single", 8, lambda report, r: decimal(report.speedup(r), 2), "speed: Single's time over this one"),
    Column("samples/s", 9, lambda _, r: decimal(r.mean("samples_per_second"), 0), "rows trained a second, all workers"),
    Column("exchanges", 9, lambda _, r: decimal(r.mean("exchanges"), 0), "exchanges, summed over the workers"),
    Column("staleness", 9, lambda _, r: decimal(r.mean("staleness"), 2), "merges by others since the last exchange"),
    Column("exchanging", 10, lambda _, r: percent(r.mean("exchanging")), "share of the time spent exchanging"),
    Column("waiting", 7, lambda _, r: percent(r.mean("waiting")), "share of the time spent waiting for data"),
)


def marks(report: Report, result: Result) -> str:
    """Return "best F1", "fastest", both or neither."""
    titles = (("best F1", report.best), ("fastest", report.fastest))
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
    """Return the comparison as text for a terminal, sorted by F1, the highest first.

    Args:
        report: Report.

    Returns:
        Text without a final newline. A failed algorithm has a line with its error.

    Example:
        >>> from choros.tools.demo.report.results import Run, Setting
        >>> print(text_table(Report(Setting("x"), (Result("Single", None, error="InvalidDataError: no rows"),))))
        algorithm      F1  accuracy  train s  x Single  samples/s  exchanges  staleness  exchanging  waiting
        ---------  ------  --------  -------  --------  ---------  ---------  ---------  ----------  -------
        Single     failed: InvalidDataError: no rows
    """
    name_width = max([len("algorithm"), *(len(r.algorithm) for r in report.results)])
    shown = [(r, [c.show(report, r) for c in COLUMNS]) for r in report.ranked()]
    widths = [max([c.width, *(len(cells[i]) for r, cells in shown if r.runs)]) for i, c in enumerate(COLUMNS)]

    def row_text(name: str, cells: list[str], mark: str = "") -> str:
        parts = [name.ljust(name_width), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))]
        return "  ".join(parts) + (f"  <- {mark}" if mark else "")

    lines = [row_text("algorithm", [c.title for c in COLUMNS]), row_text("-" * name_width, ["-" * w for w in widths])]
    for result, cells in shown:
        if result.runs:
            lines.append(row_text(result.algorithm, cells, marks(report, result)))
        if result.failed:
            lines.append(f"{result.algorithm.ljust(name_width)}  failed: {summary(result.error)}")
    return "\n".join(lines)
