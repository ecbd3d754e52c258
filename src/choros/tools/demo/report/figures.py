"""The charts of a comparison: F1 and time by algorithm, and loss against wall time; as PNG and as inline SVG.

Matplotlib is imported when a figure is drawn, without pyplot. It changes no global state and needs no display. The
colors are those of Okabe and Ito, which color-blind readers can distinguish. Lines also differ in markers and dashes.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from choros.tools.demo.report.results import Report, Result
from choros.tools.demo.report.table import decimal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK = "#1b1f24"
PALE = "#8a929b"
MODES: dict[str | None, str] = {"sync": "#0072b2", "async": "#d55e00", None: "#7b8794"}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b8794")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Figure:
    """A chart: the stem of its file name, title, caption, and the function that draws it."""

    name: str
    title: str
    text: str
    draw: Callable[[Report], Any]

    def png(self, report: Report, path: str | os.PathLike[str]) -> None:
        """Write the chart as a PNG file with a white background."""
        self.draw(report).savefig(Path(path), format="png", dpi=160, facecolor="white")

    def svg(self, report: Report) -> str:
        """Return the chart as an ``<svg>`` element with the text color of the page.

        Its ids begin with the figure's name, so that one page can contain several charts.
        """
        import matplotlib

        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.draw(report).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return _inline(buffer.getvalue(), self.name, self.title)


def available(report: Report) -> list[Figure]:
    """Return the charts for which the report has data."""
    measured = [r for r in report.results if math.isfinite(r.f1)]
    return [figure for figure in FIGURES if measured and (_curves(report) or figure.draw in (draw_f1, draw_time))]


def draw_f1(report: Report) -> Canvas:
    """Draw weighted F1 by algorithm, and the difference from Single in points."""
    results = [r for r in report.ranked() if math.isfinite(r.f1)]
    single = next((r.f1 for r in results if r.algorithm == "Single"), None)
    compare = single is not None and len(results) > 1
    figure = _figure(9.2, 1.5 + 0.34 * len(results))
    left_axes, *right = figure.subplots(
        1, 1 + compare, width_ratios=[2, 1] if compare else [1], sharey=True, squeeze=False
    )[0]
    _bars(
        left_axes,
        results,
        [r.f1 for r in results],
        [decimal(r.f1, 4) for r in results],
        [r.spread("f1") for r in results],
    )
    left_axes.set_xlim(0, 1.19)
    left_axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    left_axes.set_xlabel("weighted F1")
    if right and single is not None:
        points = [100 * (r.f1 - single) for r in results]
        _bars(right[0], results, points, [f"{p:+.2f}".replace("-", "−") for p in points])
        reach = max(1.0, *(abs(p) for p in points))
        low, high = min(0.0, *points), max(0.0, *points)
        right[0].set_xlim(low - (0.55 * reach if low < 0 else 0.08 * reach), high + 0.55 * reach)
        right[0].axvline(0, color=INK, linewidth=0.8)
        right[0].locator_params(axis="x", nbins=5)
        right[0].set_xlabel("points of F1 above or below Single")
    _key(figure, results)
    return figure


def draw_time(report: Report) -> Canvas:
    """Draw the training time by algorithm, without start-up, with the part spent in exchanges."""
    results = sorted((r for r in report.results if math.isfinite(r.seconds)), key=lambda r: r.seconds)
    figure = _figure(9.2, 1.5 + 0.34 * len(results))
    axes = figure.subplots()
    seconds = [r.seconds for r in results]
    labels = [f"{decimal(r.seconds, 2)} s, {decimal(r.mean('samples_per_second'), 0)} samples/s" for r in results]
    _bars(axes, results, seconds, labels, [r.spread("seconds") for r in results])
    exchanging = [r.seconds * max(0.0, r.mean("exchanging")) for r in results]
    axes.barh(range(len(results)), exchanging, height=0.64, color="none", edgecolor="white", hatch="/////", linewidth=0)
    axes.set_xlim(0, 1.38 * max([*seconds, 1e-9]))
    axes.set_xlabel("seconds to train, without start-up")
    _key(figure, results, hatched=any(e > 0 for e in exchanging))
    return figure


def draw_loss(report: Report) -> Canvas:
    """Draw training loss against wall time for all algorithms in one plot."""
    curves = _curves(report)
    figure = _figure(9.2, 5.0)
    axes = figure.subplots()
    for i, (result, times, losses) in enumerate(curves):
        axes.plot(times, losses, **_style(i), label=result.algorithm)
    _loss_axes(axes, curves)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("training loss")
    figure.legend(
        loc="outside right center", frameon=False, handlelength=3.4, title="least loss first", alignment="left"
    )
    return figure


def draw_each(report: Report) -> Canvas:
    """Draw training loss against wall time in one panel for each algorithm, with the others in gray."""
    curves = _curves(report)
    columns = len(curves) if len(curves) < 5 else min((5, 4), key=lambda c: -len(curves) % c)
    rows = math.ceil(len(curves) / columns)
    figure = _figure(9.2, 0.5 + 1.55 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (result, times, losses) in zip(panels.flat, curves, strict=False):
        for _, other_times, other_losses in curves:
            axes.plot(other_times, other_losses, color=PALE, alpha=0.35, linewidth=0.8)
        axes.plot(times, losses, color=MODES.get(result.mode, PALE), linewidth=2.2)
        axes.set_title(result.algorithm, fontsize=9.5, loc="left", fontweight="bold")
        _loss_axes(axes, curves)
    for axes in list(panels.flat)[len(curves) :]:
        axes.remove()
    for column in range(columns):
        lowest = max(row for row in range(rows) if row * columns + column < len(curves))
        panels[lowest, column].tick_params(labelbottom=True)
    figure.supxlabel("seconds since training began", fontsize=9.5)
    figure.supylabel("training loss", fontsize=9.5)
    return figure


FIGURES = (
    Figure("f1", "F1 by algorithm", "Weighted F1 on the rows held back, and how far that is from Single.", draw_f1),
    Figure(
        "time", "Training time by algorithm", "Seconds to train, without starting workers and compiling.", draw_time
    ),
    Figure("loss", "Loss against wall time", "Training loss at the end of each epoch, first seed.", draw_loss),
    Figure("loss_each", "Loss against wall time, one by one", "The same lines, each before the others.", draw_each),
)


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


def _bars(
    axes: Axes, results: list[Result], values: list[float], labels: list[str], spreads: list[Any] | None = None
) -> None:
    """Draw horizontal bars from top to bottom, each with a label at its end."""
    places = range(len(results))
    axes.barh(places, values, height=0.64, color=[MODES.get(r.mode, PALE) for r in results])
    ends = list(values)
    for i, (low, high) in enumerate(spreads or []):
        if high > low:
            axes.plot([low, high], [i, i], color=INK, linewidth=1.4, marker="|", markersize=6)
            ends[i] = high
    for i, (end, label) in enumerate(zip(ends, labels, strict=True)):
        side = -1 if end < 0 else 1
        axes.annotate(
            label,
            (end, i),
            (5 * side, 0),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=9,
            color=INK,
        )
    _tidy(axes, "x")
    axes.set_yticks(list(places), [r.algorithm for r in results])
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.set_ylim(len(results) - 0.4, -0.6)


def _key(figure: Canvas, results: list[Result], hatched: bool = False) -> None:
    """Draw a legend of the bars' colors above the axes."""
    from matplotlib.patches import Patch

    present = [mode for mode in MODES if any(result.mode == mode for result in results)]
    mode_names: dict[str | None, str] = {"sync": "synchronous", "async": "asynchronous", None: "no exchange"}
    handles = [Patch(facecolor=MODES[mode], label=mode_names[mode]) for mode in present]
    if hatched:
        handles.append(Patch(facecolor=PALE, edgecolor="white", hatch="/////", linewidth=0, label="of it, exchanging"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9, borderaxespad=0.2)


def _curves(report: Report) -> list[tuple[Result, list[float], list[float]]]:
    """Return times and losses of each algorithm for its first seed, sorted by the last loss."""
    curves = []
    for result in report.results:
        points = [(t, loss) for t, _, loss in result.runs[0].losses] if result.runs else []
        points = [(t, loss) for t, loss in points if math.isfinite(t) and math.isfinite(loss)]
        if points:
            curves.append((result, [t for t, _ in points], [loss for _, loss in points]))
    return sorted(curves, key=lambda curve: curve[2][-1])


def _loss_axes(axes: Axes, curves: list[tuple[Result, list[float], list[float]]]) -> None:
    _tidy(axes, "both")
    values = [loss for _, _, losses in curves for loss in losses]
    if min(values) > 0 and max(values) > 12 * min(values):
        axes.set_yscale("log")
    axes.set_xlim(left=0)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": LINES[i % len(LINES)],
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
