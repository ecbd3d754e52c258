import json
import math
from dataclasses import replace

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting, load, save
from choros.tools.demo.report.results import VERSION


def test_a_report_comes_back_from_its_file_equal(make_report, tmp_path):
    report = make_report(seeds=2, failed=("AEASGD",), interrupted=True)
    save(report, tmp_path / "results.json")
    assert load(tmp_path / "results.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_file_says_what_it_is_and_what_won(make_report, tmp_path):
    save(make_report(), tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["schema"], data["version"]) == ("choros-results", VERSION)
    assert (data["best"], data["fastest"]) == ("Ensemble", "Ensemble")
    assert data["results"][1]["runs"][0]["exchanges"] == 20


def test_numbers_that_are_not_finite_become_null_and_come_back(tmp_path):
    run = Run(seed=0, f1=math.nan, accuracy=0.5, seconds=1.0, losses=((0.5, 0, math.inf),))
    save(Report(Setting("x"), (Result("AGN", "async", runs=(run,)),)), tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    back = load(tmp_path / "r.json").results[0].runs[0]
    assert math.isnan(back.f1)
    assert math.isnan(back.losses[0][2])
    assert back.accuracy == 0.5


def test_best_and_fastest_leave_out_what_was_not_measured():
    results = (
        Result("A", runs=(Run(0, f1=math.nan, seconds=math.nan),)),
        Result("B", runs=(Run(0, f1=0.5, seconds=2.0),)),
        Result("C", error="broken"),
        Result("D", runs=(Run(0, f1=0.4, seconds=1.0),)),
    )
    report = Report(Setting("x"), results)
    assert (report.best, report.fastest) == ("B", "D")
    assert [r.algorithm for r in report.ranked()] == ["B", "D", "A", "C"]
    assert (Report(Setting("x")).best, Report(Setting("x")).fastest) == ("", "")


def test_figures_of_a_result_are_means_over_seeds(make_report):
    result = make_report(seeds=3).results[0]
    assert result.f1 == pytest.approx(0.931)
    assert result.spread("f1") == pytest.approx((0.93, 0.932))
    assert result.seconds == pytest.approx(4.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a list"),
        ('{"schema": "other"}', "no Choros report"),
        ('{"schema": "choros-results", "version": 99}', "version 99"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text, says):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "r.json")


def test_fields_that_a_later_choros_added_are_passed_over(make_report):
    report = make_report()
    data = report.to_dict()
    data["results"][0]["runs"][0]["colour"] = "blue"
    data["setting"]["weather"] = "rain"
    assert Report.from_dict(json.loads(json.dumps(data))) == report


def test_a_file_is_replaced_whole_or_not_at_all(make_report, tmp_path):
    path = tmp_path / "r.json"
    report = make_report()
    save(report, path)
    broken = replace(report, setting=replace(report.setting, notes=(object(),)))
    with pytest.raises(TypeError):
        save(broken, path)
    assert load(path) == report
