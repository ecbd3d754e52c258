"""``choros tune`` starts a script in several ways, measures steps of its ``fit``, and prints the fastest line."""

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from choros.cli import main
from choros.tools.tune import Outcome, Trial, grid, search

HEAD = """
import sys, keras, numpy as np, choros
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
"""
TRAINER = """
model.compile("sgd", "mse")
history = choros.Trainer(model, sys.argv[1]).fit(x, x[:, :3], batch_size=8, epochs=int(sys.argv[2]), verbose=0)
print("trained by", len(history.run.workers))
"""
HVD = """
hvd = choros.hvd
hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(hvd.shard(x, x[:, :3], per_rank_batch_size=4), epochs=100, verbose=0)
"""


def tune(path, *options, **environ):
    command = [sys.executable, "-m", "choros", "tune", *map(str, options[:-1]), str(path), *options[-1]]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=280)


def rows(done):
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:] if re.match(r" +\d", line)]


def test_a_trainer_s_script_is_measured_and_leaves_nothing(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEAD + TRAINER)
    options = ("--ranks", 2, "--threads", 1, "--bind", "yes", "--blocktime", 0, "--warmup", 2, "--steps", 4)
    done = tune(path, *options, ["allreduce", "1000"])
    (row,) = rows(done)
    assert row[:4] == ["2", "1", "yes", "0"]
    step, epoch = float(row[4]), float(row[5])
    assert epoch == pytest.approx(8 * step / 1e3, rel=0.02)  # 8 global batches
    plain = next(line.split() for line in done.stdout.splitlines() if line.startswith("plain"))
    assert plain[2:4] == ["no", "-"]
    assert float(plain[5]) == pytest.approx(8 * float(plain[4]) / 1e3, rel=0.02)  # the same global batches
    assert "\nPlain fit (one process, all cores) takes " in done.stdout
    line = f"choros run -n 2 --threads 1 {path} allreduce 1000"
    assert done.stdout.splitlines()[-1] == f"    KMP_BLOCKTIME=0 OMP_WAIT_POLICY=PASSIVE {line}"
    remaining = subprocess.run(["pgrep", "-f", str(path)], capture_output=True, text=True)
    assert remaining.stdout == ""


@pytest.mark.long
def test_the_line_that_is_printed_runs(tmp_path):
    """One rank trains alone, and 2 together; the line runs as it is."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + TRAINER)
    done = tune(path, "--ranks", "1,2", "--threads", 1, "--steps", 4, ["aeasgd", "50"])
    assert [row[:4] for row in rows(done)][:2] == [["1", "1", "yes", "0"], ["2", "1", "yes", "0"]]
    assert len(rows(done)) == 2 + 3
    line = done.stdout.splitlines()[-1].strip().replace("choros run", f"{shlex.quote(sys.executable)} -m choros run")
    assert "trained by" in subprocess.run(line, shell=True, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.long
def test_an_hvd_script_is_measured(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEAD + HVD)
    done = tune(path, "--ranks", "1,2", "--threads", 1, "--bind", "yes", "--blocktime", 0, "--steps", 4, [])
    steps = [float(row[5]) / (float(row[4]) / 1e3) for row in rows(done)]
    assert steps == pytest.approx([16, 8], rel=0.05)  # batches of 4 of the rank's rows


def test_a_script_that_fails_says_why(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import os\nraise ValueError(f'no data at {os.environ[\"KMP_BLOCKTIME\"]}')")
    done = tune(path, "--ranks", 1, "--threads", 1, "--bind", "yes", "--blocktime", 30, [])
    assert done.returncode == 1
    assert "ValueError: no data at 30" in done.stderr
    assert "failed" in done.stdout


def test_a_script_that_trains_too_few_steps_is_named_once_and_what_to_do(tmp_path):
    """Binding and spin time are not tried where no number of ranks and threads worked."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + "model.compile('sgd', 'mse')\nmodel.fit(x, x[:, :3], batch_size=32, verbose=0)")
    done = tune(path, "--ranks", 1, "--threads", 1, "--steps", 4, "--warmup", 2, [])
    assert done.returncode == 1
    advice = (
        "the script ended after 2 steps of fit, and 6 are needed (--warmup 2 + --steps 4): train longer, or give "
        "smaller numbers"
    )
    assert done.stdout.splitlines()[1:] == [f"    1       1   yes         0  failed: {advice}"]
    assert done.stderr.splitlines()[-1] == advice


def test_a_script_without_a_fit_is_tried_once(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('no fit here')")
    done = tune(path, "--ranks", "1,2", "--threads", 1, [])
    assert done.returncode == 1
    (row,) = done.stdout.splitlines()[1:]
    assert row.startswith("    1       1   yes         0  failed: the script ended, and no fit was seen: tune measures")
    assert (
        "choros tune: error: the first trial failed, and no other was made. It printed last:\n[0] no fit here\n"
        in done.stderr
    )


@pytest.mark.parametrize(("step", "similar"), [(1.04, True), (1.2, False)])
def test_settings_that_differ_by_less_than_their_steps_are_told(step, similar, monkeypatch, capsys, tmp_path):
    def run_trial(trial, *_):
        return Outcome(trial, step if trial.ranks == 2 else 1.0, uncertainty=0.05)

    monkeypatch.setattr("choros.tools.tune.run_trial", run_trial)
    (tmp_path / "script.py").touch()
    options = ["--ranks", "1,2", "--threads", "1", "--bind", "yes", "--blocktime", "0"]
    assert main(["tune", *options, str(tmp_path / "script.py")]) == 0
    text = "1 other setting differs from the fastest by so little that it may be chance"
    assert (text in capsys.readouterr().out) == similar


@pytest.mark.parametrize(
    ("step", "uncertainty", "words"),
    [
        (3.0, 4.0, "3.00 times as long, which may be chance: more --steps show it"),
        (0.3, 4.0, "0.30 times as long, which may be chance: more --steps show it"),
        (3.0, 0.1, "3.00 times as long as the fastest setting"),
        (1.05, 0.1, "about as long as the fastest setting"),
    ],
)
def test_only_times_that_are_alike_are_about_as_long(step, uncertainty, words, monkeypatch, capsys, tmp_path):
    def run_trial(trial, *_):
        return Outcome(trial, step, uncertainty=uncertainty) if trial.plain else Outcome(trial, 1.0)

    monkeypatch.setattr("choros.tools.tune.run_trial", run_trial)
    (tmp_path / "script.py").touch()
    options = ["--ranks", "1", "--threads", "1", "--bind", "yes", "--blocktime", "0"]
    assert main(["tune", *options, str(tmp_path / "script.py")]) == 0
    assert f"Plain fit (one process, all cores) takes {words}.\n" in capsys.readouterr().out


def test_more_steps_make_the_uncertainty_smaller(tmp_path):
    from choros.tools.tune.rank import write_result

    def uncertainty(times):
        write_result(str(tmp_path / "result"), times, None)
        return json.loads((tmp_path / "result").read_text())["uncertainty"]

    times = list(np.random.default_rng(0).normal(1.0, 0.1, 400))
    medians = [np.median(np.random.default_rng(seed).normal(1.0, 0.1, 20)) for seed in range(400)]
    assert uncertainty(times[:20]) == pytest.approx(1.96 * np.std(medians), rel=0.5)
    assert uncertainty(times) == pytest.approx(uncertainty(times[:100]) / 2, rel=0.3)
    assert uncertainty(times[:1]) == 0


def test_plain_fit_has_a_row_and_a_sentence(monkeypatch, capsys, tmp_path):
    """It is measured last, is not the fastest setting, and its failure fails nothing."""
    trials = []

    def run_trial(trial, *_):
        trials.append(trial)
        if trial.plain and failure:
            return Outcome(trial, failure=failure)
        return Outcome(trial, 0.5 if trial.plain else 1.0)

    monkeypatch.setattr("choros.tools.tune.run_trial", run_trial)
    (tmp_path / "script.py").touch()
    command = [
        "tune",
        "--ranks",
        "1",
        "--threads",
        "1",
        "--bind",
        "yes",
        "--blocktime",
        "0",
        str(tmp_path / "script.py"),
    ]
    failure = ""
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert [trial.plain for trial in trials] == [False, True]
    assert re.search(r"^plain +\d+ +no +- +500 *$", printed, re.MULTILINE)
    assert "Plain fit (one process, all cores) takes 0.50 times as long: it is faster here." in printed
    assert "choros run -n 1 --threads 1" in printed
    failure = "no such data"
    assert main(command) == 0
    assert "failed: no such data" in capsys.readouterr().out


def test_plain_fit_takes_the_arguments_that_keras_knows():
    import keras

    import choros
    from choros.tools.tune.rank import plain_fit

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    history = plain_fit(choros.Trainer(model, workers=1), x, x[:, :1], 4, seed=1, resume=False, epochs=2, verbose=0)
    assert (type(history), history.params["steps"], len(history.history["loss"])) == (keras.callbacks.History, 2, 2)


def test_what_is_no_script_is_refused(tmp_path):
    assert "does not exist" in tune(tmp_path / "none.py", []).stderr
    assert "is not a Python script" in tune("true", []).stderr
    assert "is not a Python script" in tune("true", ["script.py"]).stderr


def test_the_search_takes_the_best_ranks_for_binding_and_spin_time():
    def run(trial):
        failed = "killed" if trial.ranks == 4 else ""
        return Outcome(trial, float("inf") if failed else trial.threads / trial.ranks, failure=failed)

    trials = grid([1, 2, 4], [1, 2], cores=4)
    assert [(trial.ranks, trial.threads) for trial in trials] == [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    outcomes = list(search(trials, [True, False], [0, 200], run))
    assert [outcome.trial for outcome in outcomes[5:]] == [
        Trial(2, 1, True, 200), Trial(2, 1, False, 0), Trial(2, 1, False, 200)
    ]  # fmt: skip
    assert "failed: killed" in outcomes[4].text()
