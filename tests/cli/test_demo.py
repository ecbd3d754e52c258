"""The command itself, on real workers and with input that cannot work."""

import gzip
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

from choros.cli import main
from choros.tools.demo.datasets.higgs import FEATURES
from choros.tools.demo.report import load

pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
pytest.importorskip("matplotlib", reason="the demo needs matplotlib")


CODE = "import sys; from choros.cli import main; sys.exit(main(sys.argv[1:]))"


class Demo:
    """A demo in a process of its own, by whose mark all that it starts can be found."""

    def __init__(self, *arguments, stdout=subprocess.PIPE):
        self.mark = f"CHOROS_DEMO_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, "demo", *map(str, arguments)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )

    def left(self):
        """Processes that carry the mark, after a moment to end in."""
        for _ in range(50):
            problems = [path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/environ") if self._marked(path)]
            if not problems:
                break
            time.sleep(0.1)
        return problems

    def _marked(self, path):
        try:
            return self.mark.encode() in path.read_bytes()
        except OSError:
            return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_it_trains_for_real_and_leaves_the_report(tmp_path):
    out = tmp_path / "out"
    arguments = ("--algorithms", "aeasgd,single", "--epochs", 3, "--seeds", 2, "--target", 0.5, "--out", out)
    with Demo(*arguments) as demo:
        stdout, stderr = demo.process.communicate(timeout=280)
        assert demo.process.returncode == 0, stderr
        assert demo.left() == []
    lines = stdout.splitlines()
    assert lines[0].startswith("Loading the data, Keras and ")
    assert lines[1].startswith("scikit-learn's digits, enlarged: 1,280 rows to train on, 517 held back, 784 features")
    assert lines[3] == "Training; the line of an algorithm appears when it has trained from all seeds"
    assert lines[5].startswith("[1/3] plain fit  accuracy 0.")
    assert lines[6].startswith("[2/3] AEASGD     accuracy 0.")
    assert lines[7].startswith("[3/3] Single     accuracy 0.")
    assert lines[-1] == f"Report, with the meaning of each column: {out / 'report.html'}"
    assert "\x1b" not in stdout
    report = load(out / "results.json")
    plain, aeasgd, single = report.results
    assert plain.algorithm == "plain fit"
    assert min(result.mean("accuracy") for result in report.results) > 0.7
    assert aeasgd.settings == {"window": "8", "alpha": "0.45"}
    for result in report.results:
        for run in result.runs:
            assert [epoch for _, epoch, _ in run.losses] == [0, 1, 2]
            assert 0 < run.losses[0][0] < run.losses[2][0] == run.seconds
            assert 0 < run.to_target(0.5) <= run.seconds
            assert run.startup > 0.5
            assert len(run.accuracies) == 3
            assert run.accuracies[-1] == pytest.approx(run.accuracy, abs=1e-6)
    run, later = aeasgd.runs
    assert sum(worker["rows"] for worker in run.workers) == 3 * 1280
    assert run.exchanges == sum(run.stale) >= 14
    assert sum(s * count for s, count in enumerate(run.stale)) / run.exchanges == pytest.approx(run.staleness, abs=0.3)
    assert 0 < run.sent[0] < run.sent[2]
    assert {kind for lane in run.lanes for kind, _, _ in lane} >= {"compute", "data", "exchange"}
    assert [len(lanes) for lanes in (run.lanes, later.lanes, plain.runs[0].lanes)] == [2, 0, 0]
    assert len(single.runs[0].workers) == 1
    assert {"target.png", "timeline.png", "loss.png", "report.html"} <= {path.name for path in out.iterdir()}


@pytest.mark.long
def test_mnist_from_a_file(tmp_path):
    """A file as Keras' mnist.npz, of scikit-learn's digits."""
    from choros.tools.demo.datasets.images import load_enlarged_digits

    digits = load_enlarged_digits()
    parts = {"x_train": digits.x_train, "x_test": digits.x_test}
    images = {name: (255 * part[:200, :, :, 0]).astype("uint8") for name, part in parts.items()}
    labels = {"y_train": digits.y_train[:200].astype("uint8"), "y_test": digits.y_test[:200].astype("uint8")}
    np.savez(tmp_path / "mnist.npz", **images, **labels)
    arguments = ("--data", tmp_path / "mnist.npz", "--algorithms", "allreduce", "--epochs", 2, "--seeds", 1)
    with Demo(*arguments, "--out", tmp_path / "out") as demo:
        stdout, stderr = demo.process.communicate(timeout=280)
        assert demo.process.returncode == 0, stderr
    assert "\nMNIST (mnist.npz): 200 rows to train on, 200 held back" in stdout
    report = load(tmp_path / "out" / "results.json")
    assert report.setting.target == 0.97
    assert [result.algorithm for result in report.results] == ["plain fit", "AllReduce"]


def test_a_line_is_written_at_once(tmp_path):
    """Into a pipe, before the data, Keras and the workers are loaded, which takes up to a minute."""
    with Demo("--out", tmp_path) as demo:
        assert demo.process.stdout.readline().startswith("Loading the data, Keras and ")
        assert demo.process.poll() is None


def test_plain_fit_has_all_threads_and_no_choros():
    from choros.tools.demo import plain_fit

    source = pathlib.Path(plain_fit.__file__).read_text()
    assert not re.search(r"^\s*(import|from) choros", source, flags=re.MULTILINE)


@pytest.mark.long
def test_ctrl_c_ends_the_workers_and_keeps_what_was_measured(tmp_path):
    driver, terminal = pty.openpty()
    arguments = ("--algorithms", "single,aeasgd", "--epochs", 5, "--batch-size", 8, "--seeds", 1, "--out", tmp_path)
    with Demo(*arguments, stdout=terminal) as demo:
        os.close(terminal)
        seen = ""
        while "[3/3] AEASGD     epoch 2/5" not in seen:  # the live line of a terminal
            assert select.select([driver], [], [], 200)[0], seen
            seen += os.read(driver, 4096).decode()
        demo.process.send_signal(signal.SIGINT)
        ended = time.monotonic()
        while True:
            try:
                seen += os.read(driver, 4096).decode()
            except OSError:  # the other side has closed
                break
        assert demo.process.wait(timeout=60) == 130
        assert time.monotonic() - ended < 30
        assert demo.left() == []
    os.close(driver)
    assert "Interrupted" in seen
    assert "Traceback" not in seen
    report = load(tmp_path / "results.json")
    assert report.interrupted
    assert [(result.algorithm, len(result.runs[0].losses)) for result in report.results] == [
        ("plain fit", 5),
        ("Single", 5),
    ]
    assert "Interrupted" in (tmp_path / "report.html").read_text()


@pytest.fixture
def untouched(monkeypatch, tmp_path):
    """The demo writes into the environment of its process: put it back; work in an empty folder."""
    saved_environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(os.environ) - set(saved_environment):
        del os.environ[name]
    os.environ.update(saved_environment)


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt_before_anything_was_trained_writes_no_report(there, untouched, capsys, monkeypatch):
    from choros.tools.demo import comparison

    def train(seed, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "plain_trainer", lambda *_: train)
    if there:
        (untouched / "choros-demo").mkdir()
    backend = os.environ.get("KERAS_BACKEND", "jax")
    assert main(["demo", "--backend", backend, "--algorithms", "single"]) == 130
    out = capsys.readouterr().out
    assert out.endswith("\nInterrupted before a training had ended: no report is written.\n")
    assert "algorithm " not in out.splitlines()
    assert (untouched / "choros-demo").exists() == there
    assert not list(untouched.glob("choros-demo/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithms", "aesgd"], "did you mean"),
        (["--batch-size", "1"], "one row a worker"),
        (["--data", "nothing.csv"], "nothing.csv does not exist"),
        (["--data", "table.csv"], "lacks the column"),
        (["--data", "cut.csv.gz"], "truncated or damaged"),
        (["--data", "nothing.npz"], "nothing.npz does not exist"),
        (["--data", "text.npz"], "cannot be read as an .npz file"),
        (["--data", "other.npz"], "lacks arrays"),
        (["--data", "small.npz"], "has shape"),
        (["--out", "table.csv"], "cannot be made"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(arguments, message, untouched, capsys):
    (untouched / "text.npz").write_text("no arrays")
    np.savez(untouched / "other.npz", z=np.zeros(1))
    np.savez(untouched / "small.npz", x=np.zeros((4, 8, 8), "uint8"), y=np.zeros(4, "uint8"))
    (untouched / "table.csv").write_text("a,b\n1,2\n")
    (untouched / "cut.csv.gz").write_bytes(gzip.compress(",".join((*FEATURES, "Label")).encode())[:-20])
    backend = os.environ.get("KERAS_BACKEND", "jax")
    assert main(["demo", "--backend", backend, *arguments]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) <= 1  # that the data are loaded
    assert message in printed.err
    assert printed.err.startswith("choros demo: error: ")
    assert printed.err.splitlines()[1:] == ["See 'choros demo --help'"]
    assert not (untouched / "choros-demo").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--epochs", "two"],
        ["--seed", "-1"],
        ["--backend", "mxnet"],
        ["--target", "95"],
        ["--nonsense"],
    ],
)
def test_options_that_make_no_sense_are_bad_usage(arguments, capsys):
    assert main(["demo", *arguments]) == 2
    assert "error:" in capsys.readouterr().err


def test_an_algorithm_that_fails_gives_exit_code_1(untouched, capsys, monkeypatch):
    from choros.tools.demo import comparison
    from choros.tools.demo.report import Run

    def trainer(plan, data, pool):
        def train(algorithm, seed, progress):
            if type(algorithm).__name__ == "AGN":
                raise RuntimeError("rank 1 died")
            return Run(seed, f1=0.9, accuracy=0.9, seconds=1.0, samples_per_second=1.0), algorithm

        return train

    monkeypatch.setattr(comparison, "trainer", trainer)
    plain = Run(0, f1=0.9, accuracy=0.9, seconds=1.0, samples_per_second=1.0)
    monkeypatch.setattr(comparison, "plain_trainer", lambda *_: lambda seed, progress: plain)
    backend = os.environ.get("KERAS_BACKEND", "jax")
    assert main(["demo", "--backend", backend, "--algorithms", "agn,adag", "--seeds", "2"]) == 1
    out = capsys.readouterr().out
    assert "[2/3] AGN        failed: RuntimeError: rank 1 died" in out
    assert [len(result.runs) for result in load("choros-demo/results.json").results] == [2, 0, 2]
