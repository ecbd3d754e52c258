import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting, load, render, write
from choros.tools.demo.report.figures import FIGURES

EVIL = "<script>alert('1')</script>&\"'"
VOID = {"meta", "path", "use", "br"}
pytest.importorskip("matplotlib", reason="the charts need matplotlib")


class Page(HTMLParser):
    """Collects tags and attributes; asserts that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.open, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_all_that_the_report_holds_is_on_the_page(make_report):
    page = Page(render(make_report(seeds=2)))
    text = " ".join(" ".join(page.texts).split())
    for wanted in ("6 algorithms on digits", "1,258 to train on, 539 held back", "jax", "keras 3.15.1", "Adam"):
        assert wanted in text
    for wanted in ("2026-01-02", "Linux x86_64", "A note.", "What AEASGD is.", "LocalSGD", "0.971", "Target accuracy"):
        assert wanted in text
    assert page.tags.count("svg") == 12
    assert page.tags.count("article") == 7


def test_the_page_of_one_epoch_has_no_speeds(make_report):
    """The only epoch includes compiling. The total with start-up is right nevertheless."""
    report = make_report(seeds=2)
    one = replace(report, setting=replace(report.setting, epochs=1))
    text, page = (" ".join(Page(render(each)).texts) for each in (report, one))
    for title in ("x Single", "x fit", "to target s", "train s", "samples/s", "fastest", "exchanging", "start-up s"):
        assert title in text
    for title in ("x Single", "x fit", "to target s", "train s", "samples/s", "fastest"):
        assert title not in page
    assert "result s" in page
    assert "The only epoch includes compiling, so no speeds are given" in page


def test_nothing_is_fetched_and_no_script_runs(make_report):
    text = render(make_report())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for tag, name, value in page.values:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), (tag, value)
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_every_text_from_outside_is_escaped():
    run = Run(seed=0, f1=0.5, accuracy=0.5, seconds=1.0, losses=((0.5, 0, 1.0), (1.0, 1, 0.5)))
    setting = Setting(EVIL, 1, 1, 1, (EVIL,), EVIL, EVIL, 2, 1, 1, 1, EVIL, 1, EVIL, {EVIL: EVIL}, EVIL, (EVIL,))
    results = (
        Result(EVIL, EVIL, EVIL, {EVIL: EVIL}, (run,)),
        Result("b" + EVIL, EVIL, EVIL, {EVIL: EVIL}, error=EVIL),
    )
    page = Page(render(Report(setting, results)))
    assert "script" not in page.tags
    assert "".join(page.texts).count("alert('1')") > 10


def test_the_table_is_sorted_and_marked(make_report):
    text = render(make_report(seeds=3, failed=("AllReduce",)))
    table = text[text.index('id="table"') : text.index("</table>")]
    names = re.findall(r'<a href="#algorithm-[a-z-]+">([\w ]+)</a>', table)
    assert names == ["Ensemble", "DOWNPOUR", "AEASGD", "LocalSGD", "Single", "plain fit", "AllReduce"]
    assert table.count(">fastest<") == 1
    assert "most accurate" not in table  # the intervals of the accuracies overlap
    assert 'class="failed"' in table
    assert "WorkerFailedError: rank 1 died<" in table
    assert "its output" in text  # the whole error is in the details
    assert "Failed: AllReduce." in text
    ids = set(re.findall(r'<article id="([^"]*)"', text))
    assert {f"algorithm-{name.lower().replace(' ', '-')}" for name in names} == ids


def test_a_column_without_a_value_has_no_explanation(make_report):
    assert "x Single" in render(make_report())
    assert "x Single" not in render(make_report(failed=("Single",)))


def test_all_failed_or_nothing_measured_is_a_page_too(make_report, tmp_path):
    every = make_report().results
    failed = make_report(failed=tuple(r.algorithm for r in every))
    assert "Nothing was measured. Failed:" not in render(failed)
    assert "Failed: plain fit, Single, AllReduce" in render(failed)
    empty = replace(failed, results=(), interrupted=True)
    text = render(empty)
    assert "Nothing was measured." in text
    assert "Interrupted" in text
    Page(text)


def test_write_leaves_page_charts_and_numbers_and_clears_older_charts(make_report, tmp_path):
    report = make_report()
    page = write(report, tmp_path / "new" / "out")
    charts = [f"{figure.name}.png" for figure in FIGURES]
    assert sorted(path.name for path in page.parent.iterdir()) == sorted([*charts, "report.html", "results.json"])
    assert load(page.parent / "results.json") == report
    write(replace(report, results=()), page.parent)
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "results.json"]
