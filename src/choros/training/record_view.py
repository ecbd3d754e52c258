"""Views of a run's record: text for ``print``, HTML for notebooks, and figures by matplotlib."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.training.run_record import RunRecord, WorkerRecord

COLUMNS = ("rank", "host", "steps", "rows", "samples/s", "exchanging", "waiting for data", "staleness")


def cells(worker: WorkerRecord) -> tuple[str, ...]:
    """Return the cells of a worker's row, in the order of ``COLUMNS``."""
    return (
        str(worker.rank),
        worker.host or "local",
        f"{worker.steps:,}",
        f"{worker.rows:,}",
        f"{worker.samples_per_second:,.0f}",
        f"{worker.exchanging:.0%}",
        f"{worker.waiting:.0%}",
        f"{worker.staleness:.1f}",
    )


def text(record: RunRecord) -> str:
    """Return the summary of a run, and a table with a row for each worker."""
    rows = [COLUMNS, *map(cells, record.workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([record.summary(), *lines])


def as_html(record: RunRecord) -> str:
    """Return the summary and the table as HTML without style and scripts; all text is escaped."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(worker)) + "</tr>"
        for worker in record.workers
    )
    return (
        f"<div><p>{html.escape(record.summary())}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plot(record: RunRecord) -> Any:
    """Draw the loss over the seconds of training, the workers' samples per second, and the shares of their time.

    Returns:
        ``matplotlib.figure.Figure``. A notebook shows it; ``figure.savefig("run.svg")`` writes it.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError("history.run.plot() needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    loss, speed, time = figure.subplots(1, 3)
    loss.plot([entry[0] for entry in record.losses], [entry[2] for entry in record.losses], marker="o")
    loss.set(title="loss", xlabel="seconds of training")
    ranks = [f"rank {worker.rank}" for worker in record.workers]
    speed.barh(ranks, [worker.samples_per_second for worker in record.workers])
    speed.set(title="throughput", xlabel="samples/s")
    shares = {
        "exchanging": [worker.exchanging for worker in record.workers],
        "waiting for data": [worker.waiting for worker in record.workers],
        "callbacks": [worker.calling for worker in record.workers],
    }
    computing = [max(0.0, 1 - sum(parts)) for parts in zip(*shares.values(), strict=True)]
    left = [0.0] * len(ranks)
    for name, values in {"computing": computing, **shares}.items():
        time.barh(ranks, values, left=left, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    time.set(title="share of the training time", xlim=(0, max([1.0, *left])))
    time.legend(fontsize="small")
    for axes in (speed, time):
        axes.invert_yaxis()
    return figure
