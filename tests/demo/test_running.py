import io
import re

import numpy as np
import pytest

from choros import algorithms
from choros.tools.demo.comparison import compare, describe, score
from choros.tools.demo.plan import Plan
from choros.tools.demo.progress import Display
from choros.tools.demo.report import Run, Setting

SETTING = Setting("x", 10, 5, 3, ("0", "1"), workers=2, backend="jax", epochs=2, batch_size=8)


def make_plan(names="single,allreduce,easgd", seeds=(0,)):
    return Plan(tuple(algorithms.by_name(name) for name in names.split(",")), "jax", epochs=2, seeds=seeds)


def make_display(plan, columns=None):
    """Return a display and its stream: plain lines, or a terminal of so many columns."""
    stream, console = io.StringIO(), None
    if columns:
        rich = pytest.importorskip("rich.console", reason="rich is not installed")
        console = rich.Console(file=stream, force_terminal=True, width=columns, color_system=None, _environ={})
    names = [type(algorithm).__name__ for algorithm in plan.algorithms]
    return Display(names, len(plan.seeds), plan.epochs, console, stream), stream


def states_of(stream):
    """Return what a terminal showed, one after the other."""
    states = re.split(r"\r|\x1b\[2K|\x1b\[\?25[lh]|\x1b\[1A|\n", stream.getvalue())
    return [state.rstrip() for state in states if state.strip()]


def fake(algorithm, seed, progress):
    progress(0, 0.5)
    progress(1, 0.25)
    return Run(seed, accuracy=0.9 + seed / 100, seconds=2.0, samples_per_second=1234.0), algorithm


def test_each_algorithm_runs_once_a_seed():
    plan = make_plan(seeds=(3, 4))
    display, stream = make_display(plan)
    report = compare(plan, SETTING, fake, display)
    assert [(r.algorithm, [run.seed for run in r.runs]) for r in report.results] == [
        ("Single", [3, 4]),
        ("AllReduce", [3, 4]),
        ("EASGD", [3, 4]),
    ]
    assert stream.getvalue().splitlines()[1] == "[2/3] AllReduce  accuracy 0.935, 2.00 s, 1,234 samples/s"


def test_the_line_of_one_epoch_has_no_speed():
    """The only epoch includes compiling."""
    plan = make_plan("single")
    stream = io.StringIO()
    compare(plan, SETTING, fake, Display(["Single"], 1, 1, None, stream))
    assert stream.getvalue() == "[1/1] Single  accuracy 0.900\n"


def test_plain_fit_comes_first():
    plan = make_plan("single", seeds=(3, 4))
    display, _ = make_display(plan)
    display.begin = display.end = lambda *_: None
    report = compare(plan, SETTING, fake, display, plain=lambda seed, progress: Run(seed, accuracy=0.5))
    assert [(r.algorithm, r.mode, [run.seed for run in r.runs]) for r in report.results] == [
        ("plain fit", None, [3, 4]),
        ("Single", None, [3, 4]),
    ]
    assert report.plain == report.results[0]


def test_the_settings_are_those_that_were_used():
    plan = make_plan("easgd,single")

    def train(algorithm, seed, progress):
        return Run(seed), algorithm.bound(2, 0.1) if algorithm.mode == "sync" else algorithm

    report = compare(plan, SETTING, train, make_display(plan)[0])
    assert report.results[0].settings == {"window": "8", "alpha": "0.45"}
    assert report.results[1].settings == {}
    assert report.results[0].about == algorithms.list_algorithms()["EASGD"]


def test_one_that_fails_has_its_error_and_the_others_go_on():
    plan = make_plan(seeds=(0, 1))

    def train(algorithm, seed, progress):
        if isinstance(algorithm, algorithms.AllReduce) and seed == 1:
            raise RuntimeError("rank 1 died\nits output")
        return fake(algorithm, seed, progress)

    display, stream = make_display(plan)
    single, allreduce, easgd = compare(plan, SETTING, train, display).results
    assert (single.failed, easgd.failed) == (False, False)
    assert allreduce.error == "RuntimeError: rank 1 died\nits output"
    assert [run.seed for run in allreduce.runs] == [0]
    assert stream.getvalue().splitlines()[1].endswith("; failed: RuntimeError: rank 1 died")


@pytest.mark.parametrize(("when", "saved"), [((1, 0), ["Single"]), ((1, 1), ["Single", "AllReduce"]), ((0, 0), [])])
def test_an_interrupt_ends_it_and_keeps_what_was_measured(when, saved):
    plan = make_plan(seeds=(0, 1))
    done = []

    def train(algorithm, seed, progress):
        done.append((algorithm, seed))
        if (plan.algorithms.index(algorithm), seed) == when:
            raise KeyboardInterrupt
        return fake(algorithm, seed, progress)

    report = compare(plan, SETTING, train, make_display(plan)[0])
    assert report.interrupted
    assert [r.algorithm for r in report.results] == saved
    assert not any(r.failed for r in report.results)
    assert len(done) == 2 * when[0] + when[1] + 1


def test_what_compiled_code_makes_of_an_interrupt_is_one():
    plan, messages = make_plan(), []

    def train(algorithm, seed, progress):
        if plan.algorithms.index(algorithm) == 1:
            messages.append(True)
            raise TypeError
        return fake(algorithm, seed, progress)

    report = compare(plan, SETTING, train, make_display(plan)[0], lambda: bool(messages))
    assert report.interrupted
    assert [(r.algorithm, r.failed) for r in report.results] == [("Single", False)]


def test_a_terminal_sees_each_epoch_on_one_line():
    plan = make_plan("single", seeds=(0, 1))
    display, stream = make_display(plan, columns=100)
    compare(plan, SETTING, fake, display)
    states = list(dict.fromkeys(states_of(stream)))
    assert [state.partition(" \u2501")[0] for state in states] == [
        "[1/1] Single  seed 1/2, starting",
        "[1/1] Single  seed 1/2, epoch 1/2, loss 0.5000",
        "[1/1] Single  seed 1/2, epoch 2/2, loss 0.2500",
        "[1/1] Single  seed 2/2, starting",
        "[1/1] Single  seed 2/2, epoch 1/2, loss 0.5000",
        "[1/1] Single  seed 2/2, epoch 2/2, loss 0.2500",
        "[1/1] Single  accuracy 0.905, 2.00 s, 1,234 samples/s",
    ]
    assert stream.getvalue().endswith("\x1b[2K[1/1] Single  accuracy 0.905, 2.00 s, 1,234 samples/s\n")


def test_a_terminal_line_is_no_longer_than_the_terminal():
    plan = make_plan("single")
    display, stream = make_display(plan, columns=20)
    display.begin("Single", 0)
    display.epoch(0, 0.5)
    display.stop()
    assert max(map(len, states_of(stream))) <= 20
    assert "\x1b[1A" not in stream.getvalue().replace("\x1b[1A\x1b[2K", "", 1), "a state is one line"


def test_after_an_interrupt_the_line_is_removed_and_the_cursor_shown():
    plan = make_plan("single")
    display, stream = make_display(plan, columns=100)

    def train(algorithm, seed, progress):
        progress(0, 1.0)
        raise KeyboardInterrupt

    compare(plan, SETTING, train, display)
    assert "loss 1.0000" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_failure_is_shown():
    plan = make_plan("single")

    def train(algorithm, seed, progress):
        raise ValueError("bad [bold] data")

    for columns in (None, 30):
        display, stream = make_display(plan, columns)
        compare(plan, SETTING, train, display)
        assert "[1/1] Single  failed: ValueError: bad [bold] data\n" in stream.getvalue()


def test_the_score_is_scikit_learns():
    truth = np.array([0, 0, 0, 1])
    likeliest = np.eye(2)[[0, 0, 1, 1]]
    f1, accuracy = score(truth, likeliest)
    assert f1 == pytest.approx(0.75 * 0.8 + 0.25 * 2 / 3)
    assert accuracy == 0.75
    assert score(truth, np.eye(2)[[1, 1, 1, 0]]) == (0.0, 0.0)


def test_the_setting_in_words():
    assert describe(SETTING) == (
        "x: 10 rows to train on, 5 held back, 3 features, 2 classes\n2 workers on jax, 2 epochs, global batch 8"
    )
