import re
import sys
from xml.etree import ElementTree

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting
from choros.tools.demo.report.figures import (
    FIGURES,
    INK,
    NARROW,
    WIDE,
    available,
    draw_accuracy,
    draw_bytes,
    draw_loss,
    draw_target,
    draw_timeline,
)
from choros.tools.demo.report.table import mean_gain

SIGNATURE = b"\x89PNG\r\n\x1a\n"
to_hex = pytest.importorskip("matplotlib.colors", reason="the charts need matplotlib").to_hex


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.name)
@pytest.mark.parametrize("seeds", [1, 3])
def test_each_chart_is_a_png_and_an_svg(figure, seeds, make_report, tmp_path):
    report = make_report(seeds=seeds, failed=("AEASGD",))
    figure.png(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:8] == SIGNATURE
    root = ElementTree.fromstring(figure.svg(report))
    texts = " ".join(root.itertext())
    assert ("DOWNPOUR" if figure.name == "staleness" else "LocalSGD") in texts
    assert "AEASGD" not in texts
    assert root.get("aria-label") == figure.title


def colors_of(figure, report):
    """Return the colors of each algorithm in a chart: of its bars, its dots and its lines."""
    colors = {}
    for axes in figure.draw(report, WIDE).axes:
        axes.figure.draw_without_rendering()
        labels = [text.get_text() for text in axes.get_yticklabels()]
        if figure.name == "target":
            colors |= {label: bar.get_facecolor() for label, bar in zip(labels, axes.patches, strict=False)}
        elif figure.name == "accuracy":
            dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
            colors |= {label: line.get_color() for label, line in zip(labels, dots, strict=True)}
        elif figure.name == "staleness":
            colors[axes.get_title(loc="left")] = axes.patches[0].get_facecolor()
        else:
            colors |= {line.get_label(): line.get_color() for line in axes.get_lines()}
    return {name: to_hex(color) for name, color in colors.items()}


def test_an_algorithm_has_one_color_in_all_charts(make_report):
    report = make_report(seeds=3)
    seen = {}
    for figure in available(report):
        if figure.name != "timeline":  # its colors are those of operations
            for name, color in colors_of(figure, report).items():
                seen.setdefault(name, set()).add(color)
    assert set(seen) == {result.algorithm for result in report.results}
    assert all(len(colors) == 1 for colors in seen.values()), seen
    assert len(set.union(*seen.values())) == len(seen)
    assert seen["plain fit"] == {INK}


@pytest.mark.parametrize(
    ("low", "high"), [(0.031, 0.9), (0.11, 0.58), (0.2, 3.0), (1e-5, 2.0), (7.0, 7.0), (9.0, 11.0)]
)
def test_a_logarithmic_axis_has_several_labels(low, high):
    run = Run(
        0,
        losses=((1.0, 0, high), (2.0, 1, low)),
        accuracies=(0.5, 0.6),
        sent=(round(low * 1e6), round(high * 1e6)),
    )
    report = Report(Setting("x"), (Result("AllReduce", "sync", runs=(run,)),))
    for draw, name in ((draw_loss, "y"), (draw_bytes, "x")):
        figure = draw(report)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        limits = sorted(getattr(axes, f"get_{name}lim")())
        axis = getattr(axes, f"{name}axis")
        shown = {
            t.get_text()
            for t, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
            if limits[0] <= at <= limits[1]
        }
        assert 2 <= len(shown - {""}) <= 10, (draw, limits, shown)


def test_svgs_of_one_page_share_no_id_and_fetch_nothing(make_report):
    report = make_report()
    texts = [figure.svg(report, width) for figure in available(report) for width in (WIDE, NARROW)]
    ids = [name for text in texts for name in re.findall(r'\bid="([^"]*)"', text)]
    assert len(ids) == len(set(ids)) > 0
    for text in texts:
        used = set(re.findall(r'(?:url\(|href=")#([^)"]*)', text))
        assert used <= set(ids)
        assert not re.findall(r'(?:href|src)="(?!#)', text)
        assert "DejaVu" not in text
        assert "#1b1f24" not in text


def test_the_same_report_gives_the_same_svg(make_report):
    for figure in FIGURES:
        assert figure.svg(make_report()) == figure.svg(make_report())


def test_bars_are_the_seconds_to_the_target_with_start_up(make_report):
    report = make_report(seeds=3)
    (axes,) = draw_target(report).axes
    ranked = report.ranked()
    bars = [bar.get_width() for bar in axes.patches]
    assert bars[: len(ranked)] == pytest.approx([sum(report.targets(r)) / 3 for r in ranked])
    assert bars[len(ranked) :] == pytest.approx([r.mean("startup") for r in ranked])
    texts = [text.get_text() for text in axes.texts]
    assert texts[0].endswith(f"{mean_gain(report, ranked[0]):.2f} x")


def test_dots_are_the_accuracies_with_their_intervals(make_report):
    report = make_report(seeds=3)
    (axes,) = draw_accuracy(report).axes
    lines = [list(line.get_xdata()) for line in axes.get_lines()]
    for result, span, dot in zip(reversed(report.ranked()), lines[::2], lines[1::2], strict=True):
        low, high = report.accuracy_interval(result)
        assert span == pytest.approx([low, min(high, 1.0)])
        assert dot == pytest.approx([result.mean("accuracy")])


def test_lanes_are_what_the_workers_did(make_report):
    report = make_report()
    panels = draw_timeline(report).axes
    with_lanes = [r for r in report.results if r.runs[0].lanes]
    assert len(panels) == len(with_lanes) > 1
    spans = [path.get_extents() for path in panels[0].collections[0].get_paths()]
    computing = [(begin, end) for kind, begin, end in with_lanes[0].runs[0].lanes[0] if kind == "compute"]
    assert [box.x0 for box in spans] == pytest.approx([begin for begin, _ in computing])
    assert [box.x1 for box in spans] == pytest.approx([end for _, end in computing])


def test_lines_are_the_losses_against_seconds(make_report):
    report = make_report(seeds=2)
    panels = draw_loss(report).axes
    for axes, name in zip(panels, ("LocalSGD", "AEASGD"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        run = next(r for r in report.results if r.algorithm == name).runs[0]
        assert list(lines[name].get_xdata()) == pytest.approx([t for t, _, _ in run.losses])
        assert list(lines[name].get_ydata()) == pytest.approx([loss for _, _, loss in run.losses])
        assert lines["plain fit"].get_color() == INK
        styles = {(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in lines.values()}
        assert len(styles) == len(lines)


@pytest.mark.parametrize("draw", [f.draw for f in FIGURES], ids=lambda d: d.__name__)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_no_text_lies_on_another(draw, width, make_report):
    names = dict(zip([f"Algorithm{i}" for i in range(13)], 13 * ["async"], strict=True))
    figure = draw(make_report(seeds=2, names={"plain fit": None, "Single": None, **names}), width)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    texts = [t for axes in figure.axes for t in [*axes.texts, axes.title, axes.xaxis.label]]
    for axes in figure.axes:  # ticks beyond the limits are not drawn
        texts += [t for t in axes.get_xticklabels() if axes.get_xlim()[0] <= t.get_position()[0] <= axes.get_xlim()[1]]
        texts += [
            t for t in axes.get_yticklabels() if min(axes.get_ylim()) <= t.get_position()[1] <= max(axes.get_ylim())
        ]
    boxes = [t.get_window_extent(renderer) for t in texts if t.get_text() and t.get_visible()]
    assert len(boxes) > 3
    overlaps = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not overlaps
    width, height = figure.canvas.get_width_height()
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)


def test_one_result_without_losses_or_lanes_has_only_its_accuracy():
    report = Report(Setting("x"), (Result("AGN", "async", runs=(Run(0, accuracy=0.5, seconds=0.0),)),))
    assert [figure.name for figure in available(report)] == ["accuracy"]
    assert available(Report(Setting("x"), (Result("AGN", error="broken"),))) == []


def test_pyplot_is_never_imported(make_report):
    before = "matplotlib.pyplot" in sys.modules
    for figure in FIGURES:
        figure.draw(make_report(), WIDE)
    assert ("matplotlib.pyplot" in sys.modules) == before
