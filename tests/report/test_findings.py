from dataclasses import replace

from choros.tools.demo.report import Report, Result, Run, Setting
from choros.tools.demo.report.findings import findings

SETTING = Setting("digits", target=0.9, test_rows=500, seeds=3)


def timed(name, *seconds, startup=3.0):
    return Result(
        name,
        runs=tuple(
            Run(seed, accuracy=0.95, seconds=s, startup=startup, losses=((s, 0, 0.1),), accuracies=(0.95,))
            for seed, s in enumerate(seconds)
        ),
    )


PLAIN = timed("plain fit", 4.0, 4.1, 4.2, startup=2.0)


def test_a_gain_is_stated_with_its_interval():
    first, *others = findings(Report(SETTING, (PLAIN, timed("AEASGD", 1.0, 1.025, 1.05))))
    assert first == (
        "AEASGD trained to 90 % accuracy 4.00 times as fast as plain model.fit on all cores (1.0 s against 4.1 s; "
        "95 % interval 4.00 to 4.00)."
    )
    assert "AEASGD was the fastest: its interval lies below all others." in others
    assert any(sentence.startswith("In the final accuracy no difference beyond chance") for sentence in others)


def test_where_choros_loses_it_is_said():
    output = " ".join(findings(Report(SETTING, (PLAIN, timed("AllReduce", 8.0, 8.2, 8.4, startup=9.0)))))
    assert output.startswith("No algorithm was measurably faster to 90 % accuracy than plain model.fit (4.1 s).")
    assert "Slower than plain fit: AllReduce (0.50 x" in output
    assert "measured once) the target is reached after 17.2 s by AllReduce and after 6.1 s by plain fit." in output


def test_chance_is_said_to_be_chance():
    output = " ".join(findings(Report(SETTING, (PLAIN, timed("EASGD", 3.0, 4.5, 5.0, startup=3.5)))))
    assert "is reached after 7.7 s by EASGD and after 6.1 s by plain fit." in output
    assert "No difference from plain fit beyond chance (the intervals contain 1): EASGD" in output
    assert "No single fastest is named" in output


def test_one_seed_gives_no_interval_and_no_winner():
    output = " ".join(findings(Report(replace(SETTING, seeds=1), (timed("plain fit", 4.0), timed("EASGD", 1.0)))))
    assert "No difference from plain fit beyond chance (one seed gives no interval): EASGD (4.00 x)." in output
    assert "inf" not in output


def test_of_one_epoch_speeds_are_not_compared():
    """Plain fit compiles in its first epoch, and there is no other one whose time could be taken for it."""
    results = PLAIN, timed("AEASGD", 1.0, 1.025, 1.05)
    report = Report(replace(SETTING, epochs=1), results)
    first, *others = findings(report)
    assert first.startswith("The only epoch includes compiling, so no speeds are given: train two epochs or more")
    assert len(others) == 2
    assert others[0].startswith("With start-up ")
    assert "accuracy" in others[1]
    assert report.fastest == ""
    assert "4.00 times" in findings(Report(replace(SETTING, epochs=2), results))[0]


def test_a_gain_whose_printed_interval_contains_1_is_none():
    """The interval ends a little above 1, and is printed as "1.00 to 1.77"."""
    report = Report(SETTING, (timed("plain fit", 4.0, 4.0, 4.0), timed("AEASGD", 2.674, 3.0, 3.3656)))
    assert 1 < report.gain_interval(report.results[1])[0] < 1.005
    output = " ".join(findings(report))
    assert output.startswith("No algorithm was measurably faster")
    assert "(the intervals contain 1): AEASGD (1.33 x, 95 % interval 1.00 to 1.77)" in output


def test_a_winner_has_an_interval_apart_as_printed():
    def scored(name, *accuracies):
        return Result(name, runs=tuple(Run(seed, accuracy=a) for seed, a in enumerate(accuracies)))

    report = Report(replace(SETTING, test_rows=10**9), (scored("A", 0.9, 0.9), scored("B", 0.9002, 0.9002)))
    (_, high), (low, _) = map(report.accuracy_interval, report.results)
    assert high < low
    assert report.best == ""
    assert Report(report.setting, (report.results[0], scored("B", 0.902, 0.902))).best == "B"


def test_an_interval_of_a_gain_is_positive():
    report = Report(SETTING, (PLAIN, timed("EASGD", 1.0, 9.0, 2.0)))
    low, high = report.gain_interval(report.results[1])
    assert 0 < low < 1 < high


def test_without_plain_fit_or_measurements_nothing_is_claimed():
    assert findings(Report(SETTING, (Result("AGN", error="broken"),))) == []
    (only,) = findings(Report(SETTING, (timed("AGN", 1.0),)))
    assert only == "AGN reached an accuracy of 0.950; there is nothing to compare it with."


def test_a_busy_machine_is_named_first():
    results = PLAIN, timed("AEASGD", 1.0, 1.025, 1.05)
    busy = replace(SETTING, cores=2, other_load=0.9)
    first = findings(Report(busy, results))[0]
    assert first.startswith("Other programs used about 0.9 of 2 cores meanwhile, so the figures mean little: repeat")
    quiet = replace(SETTING, cores=2, other_load=0.1)
    assert findings(Report(quiet, results)) == findings(Report(SETTING, results))
