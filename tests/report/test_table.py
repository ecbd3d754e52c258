from choros.tools.demo.report import Report, Result, Run, Setting, text_table
from choros.tools.demo.report.table import COLUMNS, WORK, marks, summary, with_values


def test_it_is_sorted_by_the_seconds_to_the_target_and_marks_the_fastest(make_report):
    report = make_report(seeds=3)
    lines = text_table(report).splitlines()
    assert [line.split()[0] for line in lines[2:9]] == [
        "Ensemble", "DOWNPOUR", "AEASGD", "LocalSGD", "AllReduce", "Single", "plain",
    ]  # fmt: skip
    assert lines[3].endswith("<- fastest")
    assert sum("<-" in line for line in lines) == 1
    assert marks(report, report.results[0]) == ""


def test_the_speed_of_each_algorithm_is_relative_to_single(make_report):
    """Without Single, or where it failed, there is nothing to compare with."""
    column = next(c for c in WORK if c.title == "x Single")
    report = make_report()
    seconds = {result.algorithm: result.seconds for result in report.results}
    for result in report.results:
        assert column.show(report, result) == f"{seconds['Single'] / seconds[result.algorithm]:.2f}"
    for report in (make_report(failed=("Single",)), make_report(names={"AEASGD": "async"})):
        assert {column.show(report, result) for result in report.results} == {"–"}


def test_the_target_says_in_how_many_runs_it_was_missed():
    column = COLUMNS[0]
    reached, missed = (Run(i, losses=((2.0, 0, 0.1),), accuracies=(a,)) for i, a in enumerate((0.96, 0.9)))
    report = Report(Setting("x", target=0.95), ())
    assert column.show(report, Result("A", runs=(reached,))) == "2.00"
    assert column.show(report, Result("A", runs=(reached, missed))) == "not in 1 of 2"
    assert column.show(report, Result("A", runs=(missed,))) == "not reached"


def test_columns_stand_under_their_titles(make_report):
    text = text_table(make_report(seeds=2, failed=("DOWNPOUR",)))
    for columns, lines in zip((COLUMNS, WORK), (part.splitlines() for part in text.split("\n\n")), strict=True):
        check_columns(columns, [line.partition("  <-")[0] for line in lines if "failed" not in line])


def check_columns(columns, rows):
    assert len({len(row) for row in rows}) == 1
    for column in columns:
        end = rows[0].index(column.title) + len(column.title)
        assert all(row[end - 1] != " " for row in rows), column.title
        assert all(row[end : end + 1] in ("", " ") for row in rows), column.title


def test_a_column_without_a_value_is_left_out(make_report):
    heads = [line for line in text_table(make_report()).splitlines() if line.startswith("algorithm")]
    assert ["95 % interval" in heads[0], "x Single" in heads[1]] == [False, True]  # one seed has no interval
    for report in (make_report(seeds=2, failed=("Single",)), make_report(seeds=2, names={"AEASGD": "async"})):
        heads = [line for line in text_table(report).splitlines() if line.startswith("algorithm")]
        assert ["95 % interval" in heads[0], "x Single" in heads[1]] == [report.plain is not None, False]
    failed = make_report(failed=("plain fit",), names={"plain fit": None})
    assert with_values(failed, COLUMNS) == COLUMNS


def test_an_algorithm_that_failed_has_its_error_in_one_line(make_report):
    line = text_table(make_report(failed=("AEASGD",))).split("\n\n")[0].splitlines()[-1]
    assert line == "AEASGD     failed: WorkerFailedError: rank 1 died"


def test_one_that_failed_at_a_later_seed_has_both():
    result = Result("AGN", "async", runs=(Run(0, f1=0.7),), error="CommTimeoutError: rank 1 had not come")
    lines = text_table(Report(Setting("x"), (result,))).splitlines()
    assert "0.7000" in lines[2]
    assert "failed: CommTimeoutError" in lines[3]


def test_long_errors_are_cut():
    assert summary("x" * 200, limit=10) == "x" * 9 + "…"
    assert summary("short\nlong traceback") == "short"
