import re
import sys
from xml.etree import ElementTree

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting
from choros.tools.demo.report.figures import FIGURES, available, draw_f1, draw_loss, draw_time

SIGNATURE = b"\x89PNG\r\n\x1a\n"
pytest.importorskip("matplotlib", reason="the charts need matplotlib")


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.name)
@pytest.mark.parametrize("seeds", [1, 3])
def test_each_chart_is_a_png_and_an_svg(figure, seeds, make_report, tmp_path):
    report = make_report(seeds=seeds, failed=("AEASGD",))
    figure.png(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:8] == SIGNATURE
    root = ElementTree.fromstring(figure.svg(report))
    texts = " ".join(root.itertext())
    assert "LocalSGD" in texts
    assert "AEASGD" not in texts
    assert root.get("aria-label") == figure.title


def test_svgs_of_one_page_share_no_id_and_fetch_nothing(make_report):
    report = make_report()
    texts = [figure.svg(report) for figure in available(report)]
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


def test_bars_are_as_long_as_what_was_measured(make_report):
    report = make_report()
    left, right = draw_f1(report).axes
    ranked = report.ranked()
    assert [bar.get_width() for bar in left.patches] == pytest.approx([r.f1 for r in ranked])
    single = report.results[0].f1
    assert [bar.get_width() for bar in right.patches] == pytest.approx([100 * (r.f1 - single) for r in ranked])
    (axes,) = draw_time(report).axes
    times = sorted(r.seconds for r in report.results)
    assert [bar.get_width() for bar in axes.patches[: len(times)]] == pytest.approx(times)


def test_lines_are_the_losses_against_seconds(make_report):
    report = make_report(seeds=2)
    (axes,) = draw_loss(report).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    run = report.results[2].runs[0]
    assert list(lines["LocalSGD"].get_xdata()) == pytest.approx([t for t, _, _ in run.losses])
    assert list(lines["LocalSGD"].get_ydata()) == pytest.approx([loss for _, _, loss in run.losses])
    styles = {(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in lines.values()}
    assert len(styles) == len(lines)


@pytest.mark.parametrize("draw", [f.draw for f in FIGURES], ids=lambda d: d.__name__)
def test_no_text_lies_on_another(draw, make_report):
    names = dict(zip([f"Algorithm{i}" for i in range(13)], 13 * ["async"], strict=True))
    figure = draw(make_report(seeds=2, names={"Single": None, **names}))
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


def test_one_result_without_single_or_losses_has_no_comparison_and_no_curves():
    report = Report(Setting("x"), (Result("AGN", "async", runs=(Run(0, f1=0.5, seconds=0.0),)),))
    assert [figure.name for figure in available(report)] == ["f1", "time"]
    assert len(draw_f1(report).axes) == 1
    assert available(Report(Setting("x"), (Result("AGN", error="broken"),))) == []


def test_pyplot_is_never_imported(make_report):
    before = "matplotlib.pyplot" in sys.modules
    for figure in FIGURES:
        figure.draw(make_report())
    assert ("matplotlib.pyplot" in sys.modules) == before
