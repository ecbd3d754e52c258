"""The charts of a comparison, as PNG and as inline SVG for wide and for narrow screens.

Matplotlib is imported when a figure is drawn, without pyplot. It changes no global state and needs no display. Each
algorithm has the same color in all charts. The colors are those of Okabe and Ito, which color-blind readers can
distinguish. Lines also differ in markers and dashes.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from choros.tools.demo.report.results import PLAIN, Report, Result, interval
from choros.tools.demo.report.table import decimal, mean_gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas

INK = "#1b1f24"
PALE = "#8a929b"
MODE_NAMES: dict[str | None, str] = {"sync": "synchronous", "async": "asynchronous", None: "no exchange"}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b8794")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
KINDS = {"compute": "#56b4e9", "exchange": "#d55e00", "wait": "#c9a227", "data": "#009e73"}
ORDER = ("compute", "data", "exchange", "wait")  # later kinds are painted over earlier ones: waits lie in exchanges
WIDE, NARROW = 9.2, 4.3  # inches: the widths for large screens and for phones


@dataclass(frozen=True)
class Figure:
    """A chart: the stem of its file name, title, caption, the function that draws it, and whether it has data."""

    name: str
    title: str
    text: str
    draw: Callable[[Report, float], Any]
    has_data: Callable[[Report], bool]

    def png(self, report: Report, path: str | os.PathLike[str]) -> None:
        """Write the chart as a PNG file with a white background."""
        self.draw(report, WIDE).savefig(Path(path), format="png", dpi=160, facecolor="white")

    def svg(self, report: Report, width: float = WIDE) -> str:
        """Return the chart as an ``<svg>`` element with the text color of the page.

        Its ids begin with the figure's name and width, so that one page can contain several charts.
        """
        import matplotlib

        buffer, name = io.StringIO(), self.name if width == WIDE else f"{self.name}-narrow"
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            self.draw(report, width).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return _inline(buffer.getvalue(), name, self.title)


def available(report: Report) -> list[Figure]:
    """Return the charts for which the report has data."""
    return [figure for figure in FIGURES if figure.has_data(report)]


def draw_target(report: Report, width: float = WIDE) -> Canvas:
    """Draw the seconds to the target accuracy, with start-up, and the speed-up against plain ``fit``."""
    results = [r for r in report.ranked() if math.isfinite(report.result_seconds(r))]
    figure = _figure(width, 1.6 + 0.42 * len(results))
    axes = figure.subplots()
    training = [report.result_seconds(r) - r.mean("startup") for r in results]
    startup = [r.mean("startup") for r in results]
    places = range(len(results))
    axes.barh(places, training, height=0.62, color=[_color(report, r) for r in results])
    axes.barh(places, startup, left=training, height=0.62, color=PALE, alpha=0.35)
    for i, result in enumerate(results):
        low, high = interval(report.targets(result))
        if math.isfinite(low) and high > low:
            axes.plot([max(low, 0), high], [i, i], color=INK, linewidth=1.3, marker="|", markersize=6)
        gain = mean_gain(report, result)
        text = f"{decimal(training[i], 1)} s" + (
            f", {gain:.2f} x" if math.isfinite(gain) and result.algorithm != PLAIN else ""
        )
        end = max(training[i] + startup[i], high if math.isfinite(high) else 0.0)
        axes.annotate(text, (end, i), (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    _tidy(axes, "x")
    _names(axes, [r.algorithm for r in results])
    highs = [interval(report.targets(r))[1] for r in results]
    longest = max(t + s for t, s in zip(training, startup, strict=True))
    axes.set_xlim(0, (1.3 if width == WIDE else 1.55) * max(longest, *(h for h in highs if math.isfinite(h)), 1e-9))
    axes.set_xlabel("seconds")
    _patches(figure, [("start-up", PALE, 0.35)], 1)
    return figure


def draw_timeline(report: Report, width: float = WIDE) -> Canvas:
    """Draw a lane for each worker of each algorithm: what it did in the first second after the first epoch."""
    results = _with_lanes(report)
    counts = [len(r.runs[0].lanes) for r in results]
    figure = _figure(width, 1.1 + sum(0.55 + 0.26 * count for count in counts))
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False, height_ratios=[c + 1 for c in counts])
    for axes, result in zip(panels[:, 0], results, strict=True):
        paint_lanes(axes, result.runs[0].lanes)
        axes.set_title(f"{result.algorithm}, {MODE_NAMES[result.mode]}", fontsize=9.5, loc="left", color=INK)
        axes.tick_params(axis="x", labelsize=9, colors=INK)
    panels[-1, 0].set_xlabel("seconds after the first epoch")
    panels[-1, 0].set_xlim(0, max(end for r in results for lane in r.runs[0].lanes for _, _, end in lane))
    _patches(figure, [(name, color, 1.0) for name, color in KINDS.items()], 4)
    return figure


def paint_lanes(axes: Axes, lanes: Sequence[Sequence[tuple[str, float, float]]]) -> None:
    """Paint one lane for each worker, from top to bottom."""
    for rank, lane in enumerate(lanes):
        for kind, color in KINDS.items():
            spans = [(begin, end - begin) for name, begin, end in lane if name == kind]
            axes.broken_barh(spans, (rank - 0.4, 0.8), facecolors=color, linewidth=0, zorder=ORDER.index(kind) + 2)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [f"worker {rank}" for rank in range(len(lanes))])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(axis="y", length=0, labelsize=9, colors=INK)


def draw_loss(report: Report, width: float = WIDE) -> Canvas:
    """Draw training loss against seconds: plain ``fit`` in black, with synchronous and with asynchronous algorithms."""
    return _curves(
        report,
        width,
        lambda run: [(t, loss) for t, _, loss in run.losses],
        "seconds of training, without start-up",
        "training loss",
    )


def draw_accuracy(report: Report, width: float = WIDE) -> Canvas:
    """Draw the accuracy of each result as a dot with its 95 % interval."""
    results = [r for r in reversed(report.ranked()) if math.isfinite(r.mean("accuracy"))]
    figure = _figure(width, 1.2 + 0.34 * len(results))
    axes = figure.subplots()
    for i, result in enumerate(results):
        low, high = report.accuracy_interval(result)
        if math.isfinite(low):
            axes.plot([low, min(high, 1.0)], [i, i], color=_color(report, result), linewidth=2)
        axes.plot([result.mean("accuracy")], [i], "o", color=_color(report, result), markersize=6)
    _tidy(axes, "x")
    axes.set_yticks(range(len(results)), [r.algorithm for r in results])
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.set_ylim(-0.6, len(results) - 0.4)
    axes.locator_params(axis="x", nbins=6 if width == WIDE else 4)
    axes.set_xlabel("accuracy on the rows held back")
    return figure


def draw_staleness(report: Report, width: float = WIDE) -> Canvas:
    """Draw, for each asynchronous algorithm, the share of its exchanges by their staleness."""
    results = _with_staleness(report)
    columns = min(len(results), 4 if width == WIDE else 2)
    rows = math.ceil(len(results) / columns)
    figure = _figure(width, 0.5 + 1.9 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, result in zip(panels.flat, results, strict=False):
        length = max(len(run.stale) for run in result.runs)
        counts = [sum(run.stale[s] for run in result.runs if s < len(run.stale)) for s in range(length)]
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.bar(range(length), shares, color=_color(report, result), width=0.8)
        axes.set_title(result.algorithm, fontsize=9.5, loc="left", color=INK)
        _tidy(axes, "y")
        axes.set_xlim(-0.7, max(length, 4) - 0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in list(panels.flat)[len(results) :]:
        axes.remove()
    figure.supxlabel("staleness: exchanges by others since the last one", fontsize=9.5, color=INK)
    figure.supylabel("share of exchanges", fontsize=9.5, color=INK)
    return figure


def draw_bytes(report: Report, width: float = WIDE) -> Canvas:
    """Draw the accuracy at the end of each epoch against the bytes that all workers had exchanged."""
    figure = _figure(width, 3.6 if width == WIDE else 4.4)
    axes = figure.subplots()
    for result in _with_bytes(report):
        run = result.runs[0]
        megabytes = [sent / 1e6 for sent in run.sent]
        axes.plot(megabytes, run.accuracies[: len(megabytes)], **_style(report, result), label=result.algorithm)
    _tidy(axes, "both")
    axes.set_xscale("log")
    _label_logarithmic(axes.xaxis)
    axes.set_xlabel("megabytes exchanged, all workers")
    axes.set_ylabel("accuracy on the rows held back")
    _legend(figure, width)
    return figure


def _with_lanes(report: Report) -> list[Result]:
    return [r for r in report.results if r.runs and any(r.runs[0].lanes)]


def _with_staleness(report: Report) -> list[Result]:
    return [r for r in report.results if any(any(run.stale) for run in r.runs)]


def _with_bytes(report: Report) -> list[Result]:
    return [r for r in report.results if r.runs and r.runs[0].accuracies and max(r.runs[0].sent, default=0) > 0]


def _with_losses(report: Report) -> list[Result]:
    return [r for r in report.results if r.runs and r.runs[0].losses and report.steady]


FIGURES = (
    Figure(
        "target",
        "Seconds to the target accuracy",
        "Training in the color of the algorithm, start-up in gray behind it; the lines are 95 % intervals of the "
        "training over the seeds. The speed-up is that of the training against plain fit.",
        draw_target,
        lambda report: report.steady and any(math.isfinite(report.result_seconds(r)) for r in report.results),
    ),
    Figure(
        "timeline",
        "What the workers did",
        "A lane for each worker, first seed, after the first epoch. Blank: Python and Keras between these operations.",
        draw_timeline,
        lambda report: bool(_with_lanes(report)),
    ),
    Figure(
        "loss",
        "Loss against seconds",
        "Training loss at the end of each epoch, first seed. Black: plain fit.",
        draw_loss,
        lambda report: bool(_with_losses(report)),
    ),
    Figure(
        "accuracy",
        "Accuracy",
        "Accuracy after the last epoch, with 95 % intervals. Where these overlap, the difference may be chance.",
        draw_accuracy,
        lambda report: any(math.isfinite(r.mean("accuracy")) for r in report.results),
    ),
    Figure(
        "staleness",
        "Staleness",
        "How many exchanges by other workers lay between two exchanges of a worker, over all seeds.",
        draw_staleness,
        lambda report: bool(_with_staleness(report)),
    ),
    Figure(
        "bytes",
        "Accuracy against bytes exchanged",
        "Accuracy on the test rows at the end of each epoch, first seed.",
        draw_bytes,
        lambda report: bool(_with_bytes(report)),
    ),
)


def _curves(
    report: Report, width: float, points: Callable[[Any], list[tuple[float, float]]], horizontal: str, vertical: str
) -> Canvas:
    """Draw curves of the first seed in one panel for each mode; plain ``fit`` is in black in each."""
    results = _with_losses(report)
    groups = [[r for r in results if r.mode == mode and r.algorithm != PLAIN] for mode in ("sync", "async")]
    groups[0] = [r for r in results if r.mode is None and r.algorithm != PLAIN] + groups[0]
    groups = [group for group in groups if group] or [[]]
    across = width == WIDE
    figure = _figure(width, 3.8 if across else 3.4 * len(groups))
    shape = (1, len(groups)) if across else (len(groups), 1)
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    plain = next((r for r in results if r.algorithm == PLAIN), None)
    values = [value for r in results for _, value in points(r.runs[0]) if math.isfinite(value)]
    for axes, group in zip(panels.flat, groups, strict=True):
        if plain is not None:
            times, losses = zip(*points(plain.runs[0]), strict=True)
            axes.plot(times, losses, color=INK, linewidth=2.4, label=PLAIN)
        for result in group:
            times, losses = zip(*points(result.runs[0]), strict=True)
            axes.plot(times, losses, **_style(report, result), label=result.algorithm)
        _tidy(axes, "both")
        axes.set_xlim(left=0)
        if axes.get_lines():
            axes.legend(frameon=False, fontsize=9, handlelength=2.6, labelcolor=INK)
        if group:
            mode = "asynchronous" if group[-1].mode == "async" else "synchronous"
            axes.set_title(mode, fontsize=9.5, loc="left", color=INK)
    if values and min(values) > 0 and max(values) > 12 * min(values):
        for axes in panels.flat:
            axes.set_yscale("log")
        for axes in panels.flat:  # now that all panels have their common limits
            _label_logarithmic(axes.yaxis)
    figure.supxlabel(horizontal, fontsize=9.5, color=INK)
    figure.supylabel(vertical, fontsize=9.5, color=INK)
    return figure


def _figure(width: float, height: float) -> Canvas:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.03)
    figure = Canvas(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Axes, grid: Literal["both", "x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9, length=3, which="both")
    axes.grid(axis=grid, color=PALE, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


def _names(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _label_logarithmic(axis: Axis) -> None:
    """Label an axis of logarithmic scale, with limits, by numbers in plain notation."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    ticks = log_ticks(low, high)
    axis.set_major_locator(FixedLocator(ticks) if ticks else MaxNLocator(4))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float) -> list[float]:
    """Return the coarsest round numbers of which at least three lie between two limits; none for close limits.

    Example:
        >>> log_ticks(0.5, 2e6), log_ticks(0.03, 0.9), log_ticks(2.0, 3.0)
        ([1.0, 1000.0, 1000000.0], [0.03, 0.1, 0.3], [])
    """
    for step, digits in ((3, (1,)), (2, (1,)), (1, (1,)), (1, (1, 3)), (1, (1, 2, 5))):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [float(f"{digit}e{power}") for power in powers if power % step == 0 for digit in digits]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) >= 3:
            return within
    return []


def _place(report: Report, result: Result) -> int:
    """Return the place of an algorithm among those of the report, which decides its color in all charts."""
    return [r.algorithm for r in report.results if r.algorithm != PLAIN].index(result.algorithm)


def _color(report: Report, result: Result) -> str:
    return INK if result.algorithm == PLAIN else LINES[_place(report, result) % len(LINES)]


def _patches(figure: Canvas, entries: list[tuple[str, str, float]], columns: int) -> None:
    """Draw a legend of colors above the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, alpha=alpha, label=name) for name, color, alpha in entries]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        columnspacing=1.2,
        handlelength=1.4,
        labelcolor=INK,
    )


def _legend(figure: Canvas, width: float) -> None:
    place = "outside right center" if width == WIDE else "outside upper left"
    figure.legend(
        loc=place, frameon=False, fontsize=9, handlelength=2.6, labelcolor=INK, ncols=1 if width == WIDE else 2
    )


def _style(report: Report, result: Result) -> dict[str, Any]:
    i = _place(report, result)
    return {
        "color": _color(report, result),
        "linestyle": DASHES[(i // len(LINES)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
        "markeredgewidth": 0,
    }


def _inline(text: str, name: str, title: str) -> str:
    """Convert matplotlib's file to an element with unique ids, the page's color and font, and a label."""
    element = text[text.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", element)
    element = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", element)
    element = re.sub(re.escape(INK) + r"|#000000", "currentColor", element)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return re.sub(r"<svg", f'<svg role="img" aria-label="{title}"', element, count=1).strip()
