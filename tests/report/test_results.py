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
    assert (data["best"], data["fastest"]) == ("", "")  # one seed parts nothing
    assert data["results"][2]["runs"][0]["exchanges"] == 40


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


def timed(name, *seconds, accuracy=0.95):
    runs = (
        Run(seed, accuracy=accuracy, seconds=s, losses=((s, 0, 0.1),), accuracies=(accuracy,))
        for seed, s in enumerate(seconds)
    )
    return Result(name, runs=tuple(runs))


def test_a_winner_is_named_only_where_intervals_part():
    setting = Setting("x", target=0.9, test_rows=500)
    clear = Report(setting, (timed("A", 2.0, 2.1, 2.2), timed("B", 4.0, 4.1, 4.2), Result("C", error="broken")))
    assert (clear.best, clear.fastest) == ("", "A")
    noisy = Report(setting, (timed("A", 2.0, 3.0, 4.0), timed("B", 2.2, 4.1, 4.2)))
    assert noisy.fastest == ""
    single_seed = Report(setting, (timed("A", 2.0), timed("B", 4.0)))
    assert single_seed.fastest == ""
    accurate = Report(setting, (timed("A", 2.0, 2.0, accuracy=0.98), timed("B", 2.0, 2.0, accuracy=0.92)))
    assert accurate.best == "A"
    assert (Report(setting).best, Report(setting).fastest) == ("", "")


def test_an_ensemble_is_never_the_fastest():
    setting = Setting("x", target=0.9, test_rows=500)
    report = Report(setting, (timed("Ensemble", 1.0, 1.0), timed("A", 2.0, 2.1), timed("B", 40.0, 40.1)))
    assert report.fastest == "A"


def test_what_missed_the_target_is_last_and_has_no_gain():
    setting = Setting("x", target=0.9, test_rows=500)
    report = Report(setting, (timed("A", 1.0, accuracy=0.8), timed("plain fit", 4.0), timed("B", 2.0)))
    assert [r.algorithm for r in report.ranked()] == ["B", "plain fit", "A"]
    assert [report.gains(r) for r in report.ranked()[:2]] == [[2.0], [1.0]]
    assert math.isnan(report.gains(report.results[0])[0])


def test_figures_of_a_result_are_means_over_seeds(make_report):
    result = make_report(seeds=3).results[0]
    assert result.f1 == pytest.approx(0.931)
    assert result.spread("f1") == pytest.approx((0.93, 0.932))
    assert result.seconds == pytest.approx(4.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a list"),
        ('{"schema": "other"}', "not a Choros report"),
        ('{"schema": "choros-results", "version": 99}', "version 99"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
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
