from choros.tools.demo.report import Report, Result, Run, Setting, text_table
from choros.tools.demo.report.table import COLUMNS, marks, summary


def test_it_is_sorted_by_f1_and_marks_the_best_and_the_fastest():
    results = (
        Result("Slow", runs=(Run(0, f1=0.9, accuracy=0.91, seconds=9.0, samples_per_second=1234.6),)),
        Result("Fast", runs=(Run(0, f1=0.8, accuracy=0.81, seconds=1.5, samples_per_second=99999.0),)),
        Result("Mid", runs=(Run(0, f1=0.85, seconds=3.0),)),
    )
    report = Report(Setting("x"), results)
    lines = text_table(report).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["Slow", "Mid", "Fast"]
    assert lines[2].endswith("<- best F1")
    assert lines[4].endswith("<- fastest")
    assert lines[2].split()[1:6] == ["0.9000", "0.9100", "9.00", "–", "1,235"]
    assert marks(report, results[2]) == ""


def test_the_speed_of_each_algorithm_is_relative_to_single(make_report):
    """Without Single, or where it failed, there is nothing to compare with."""
    cells = {line.split()[0]: line.split()[4] for line in text_table(make_report()).splitlines()[2:]}
    seconds = {result.algorithm: result.seconds for result in make_report().results}
    assert cells["Single"] == "1.00"
    assert cells == {name: f"{seconds['Single'] / time:.2f}" for name, time in seconds.items()}
    for report in (make_report(failed=("Single",)), make_report(names={"AEASGD": "async"})):
        assert {line.split()[4] for line in text_table(report).splitlines()[2:] if "failed" not in line} == {"–"}


def test_columns_stand_under_their_titles(make_report):
    lines = text_table(make_report(failed=("DOWNPOUR",))).splitlines()
    rows = [line.partition("  <-")[0] for line in lines if "failed" not in line]
    assert len({len(row) for row in rows}) == 1
    for column in COLUMNS:
        end = rows[0].index(column.title) + len(column.title)
        assert all(row[end - 1] != " " for row in rows), column.title
        assert all(row[end : end + 1] in ("", " ") for row in rows), column.title


def test_an_algorithm_that_failed_has_its_error_in_one_line(make_report):
    line = text_table(make_report(failed=("AEASGD",))).splitlines()[-1]
    assert line == "AEASGD     failed: WorkerFailedError: rank 1 died"


def test_one_that_failed_at_a_later_seed_has_both():
    result = Result("AGN", "async", runs=(Run(0, f1=0.7),), error="CommTimeoutError: rank 1 had not come")
    lines = text_table(Report(Setting("x"), (result,))).splitlines()
    assert "0.7000" in lines[2]
    assert "failed: CommTimeoutError" in lines[3]


def test_long_errors_are_cut():
    assert summary("x" * 200, limit=10) == "x" * 9 + "…"
    assert summary("short\nlong traceback") == "short"
