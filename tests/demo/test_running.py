import io

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


def make_display(plan, live=False):
    stream = io.StringIO()
    names = [type(algorithm).__name__ for algorithm in plan.algorithms]
    return Display(names, len(plan.seeds), plan.epochs, stream, live), stream


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


def test_plain_fit_comes_first():
    plan = make_plan("single", seeds=(3, 4))
    display, _ = make_display(plan)
    display.begin = lambda name, run: None
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


@pytest.mark.parametrize(("when", "kept"), [((1, 0), ["Single"]), ((1, 1), ["Single", "AllReduce"]), ((0, 0), [])])
def test_an_interrupt_ends_it_and_keeps_what_was_measured(when, kept):
    plan = make_plan(seeds=(0, 1))
    done = []

    def train(algorithm, seed, progress):
        done.append((algorithm, seed))
        if (plan.algorithms.index(algorithm), seed) == when:
            raise KeyboardInterrupt
        return fake(algorithm, seed, progress)

    report = compare(plan, SETTING, train, make_display(plan)[0])
    assert report.interrupted
    assert [r.algorithm for r in report.results] == kept
    assert not any(r.failed for r in report.results)
    assert len(done) == 2 * when[0] + when[1] + 1


def test_what_compiled_code_makes_of_an_interrupt_is_one():
    plan, told = make_plan(), []

    def train(algorithm, seed, progress):
        if plan.algorithms.index(algorithm) == 1:
            told.append(True)
            raise TypeError
        return fake(algorithm, seed, progress)

    report = compare(plan, SETTING, train, make_display(plan)[0], lambda: bool(told))
    assert report.interrupted
    assert [(r.algorithm, r.failed) for r in report.results] == [("Single", False)]


def test_a_terminal_sees_each_epoch_on_one_line():
    plan = make_plan("single", seeds=(0, 1))
    display, stream = make_display(plan, live=True)
    compare(plan, SETTING, fake, display)
    states = stream.getvalue().split("\r\x1b[K")[1:]
    assert states[:3] == [
        "[1/1] Single  seed 1/2, starting",
        "[1/1] Single  seed 1/2, epoch 1/2, loss 0.5000",
        "[1/1] Single  seed 1/2, epoch 2/2, loss 0.2500",
    ]
    assert states[-1] == "[1/1] Single  accuracy 0.905, 2.00 s, 1,234 samples/s\n"
    assert stream.getvalue().count("\n") == 1


def test_a_terminal_line_is_no_longer_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    plan = make_plan("single")
    display, stream = make_display(plan, live=True)
    display.begin("Single", 0)
    display.epoch(0, 0.5)
    assert all(len(state) < 20 for state in stream.getvalue().split("\r\x1b[K"))


def test_after_an_interrupt_the_cursor_has_a_line_of_its_own():
    plan = make_plan("single")
    display, stream = make_display(plan, live=True)

    def train(algorithm, seed, progress):
        progress(0, 1.0)
        raise KeyboardInterrupt

    compare(plan, SETTING, train, display)
    assert stream.getvalue().endswith("loss 1.0000\n")


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
