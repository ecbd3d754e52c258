"""``Trainer(timeline=)``: one file with a lane per worker, in every mode and wherever the workers run."""

import collections
import json
import subprocess
import sys
import textwrap

import keras
import pytest

import choros
from choros.errors import InvalidInputError
from choros.tools.demo.measurement import steps_of

HOW = {"batch_size": 8, "epochs": 2, "verbose": 0}
MODES = {
    "allreduce": choros.AllReduce(),
    "window": choros.LocalSGD(window=3),
    "async": choros.AEASGD(window=3),
    "ensemble": choros.Ensemble(),
}


def lanes(path):
    """Return the spans of each lane, after a check of the nesting of its spans."""
    events = json.loads(path.read_text())["traceEvents"]
    results = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            results[event["pid"] - 1].append(event)
    for spans in results.values():
        ends = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            begin, end = span["ts"], span["ts"] + span["dur"]
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, span
            ends.append(end)
    return dict(results)


def kinds(spans):
    return collections.Counter(span["cat"] for span in spans)


class Slow(keras.callbacks.Callback):
    """A callback whose time all synchronous workers wait for."""

    def on_epoch_end(self, epoch, logs=None):
        import time

        time.sleep(0.3)


@pytest.mark.parametrize("mode", MODES)
def test_lanes_of_local_workers(mode, make_model, data, pools, tmp_path):
    x, y = data()
    path = tmp_path / "run.json"
    trainer = choros.Trainer(
        make_model(keras.optimizers.SGD(0.05)), MODES[mode], workers=2, pool=pools(2), timeline=path
    )
    history = trainer.fit(x, y, validation_split=0.2, callbacks=[Slow()], **HOW)
    result = lanes(path)
    assert sorted(result) == [0, 1]
    for rank, spans in result.items():
        worker, count = history.run.workers[rank], kinds(spans)
        assert count["data"] == worker.steps
        assert sum(map(steps_of, spans)) == worker.steps
        assert count["exchange"] == worker.exchanges == (0 if mode == "ensemble" else worker.exchanges)
        # The wait for the device at the end of each epoch too: it would be a gap in the lane otherwise.
        settled = [span["cat"] for span in spans if span["name"] == "steps on the device"]
        before_exchanges = worker.exchanges if mode in ("window", "async") else 0
        assert settled == ["compute"] * (before_exchanges + HOW["epochs"])
        exchanged = [span for span in spans if span["cat"] == "exchange"]
        assert all(span["args"]["bytes"] >= 4 * 75 for span in exchanged)  # 8 * 6 + 6 + 6 * 3 + 3 weights
        if mode != "ensemble":
            assert any(span["args"]["wait_us"] > 0 for span in exchanged)
    waits = [[span for span in spans if span["name"] == "callbacks of an epoch"] for spans in result.values()]
    if mode in ("allreduce", "window"):
        for waits_of_epoch in zip(*waits, strict=True):
            # A rank may begin to wait after the callbacks began: only the ends are bound to the callbacks.
            begin = min(span["ts"] for span in waits_of_epoch)
            assert all(span["ts"] + span["dur"] >= begin + 0.3e6 for span in waits_of_epoch)
        assert all(len(waits_of_rank) == HOW["epochs"] for waits_of_rank in waits)
    second = {rank: min(span["ts"] for span in spans) for rank, spans in result.items()}
    assert abs(second[0] - second[1]) < 5e6  # one clock


SCRIPT = """
import keras, numpy as np, choros
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(60, 8)).astype("float32")
for name in ("allreduce", "aeasgd"):
    choros.Trainer(model, name, timeline=f"{name}.json").fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0)
"""


def test_lanes_of_ranks_of_a_job(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "--threads", "1", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("allreduce", "aeasgd"):
        result = lanes(tmp_path / f"{name}.json")
        assert sorted(result) == [0, 1]
        assert all(kinds(spans)["data"] and kinds(spans)["exchange"] for spans in result.values())
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["aeasgd.json", "allreduce.json"]


@pytest.mark.long
def test_lanes_of_ranks_that_a_launcher_starts(make_model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = data()
    launcher = choros.Ssh("localhost:2")
    history = choros.Trainer(make_model(), launcher=launcher, timeline="run.json", threads=1).fit(x, y, **HOW)
    result = lanes(tmp_path / "run.json")
    assert sorted(result) == [0, 1]
    assert [kinds(result[rank])["exchange"] for rank in (0, 1)] == [worker.exchanges for worker in history.run.workers]


def test_a_file_that_cannot_be_written_is_refused_before_a_worker_starts(make_model, tmp_path):
    with pytest.raises(InvalidInputError, match="No such file or directory"):
        choros.Trainer(make_model(), workers=2, timeline=tmp_path / "missing" / "run.json")
    with pytest.raises(InvalidInputError, match="not less"):
        choros.Trainer(make_model(), workers=2, profile=tmp_path, profile_batches=(3, 2))


def test_each_worker_writes_its_backend_s_profile(make_model, data, pools, tmp_path):
    x, y = data()
    trainer = choros.Trainer(
        make_model(keras.optimizers.SGD(0.05)),
        "aeasgd",
        workers=2,
        pool=pools(2),
        profile=tmp_path,
        profile_batches=(1, 2),
    )
    trainer.fit(x, y, **HOW)
    for rank in (0, 1):
        files = [path for path in (tmp_path / f"rank-{rank}").rglob("*") if path.is_file()]
        assert files
        assert all(path.stat().st_size for path in files)


def test_tensorboard_is_an_ordinary_callback(make_model, data, pools, tmp_path):
    """Its files hold the same scalars and steps as those of Keras' own ``fit``, and histograms of the weights."""
    pytest.importorskip("tensorboard")  # which TensorFlow needs to write scalars, with each backend
    tensorflow = pytest.importorskip("tensorflow")

    def written(folder):
        scalars, tags = {}, set()
        for path in folder.glob("events*"):
            for event in tensorflow.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    tags.add(value.tag)
                    if value.tag.startswith("epoch_"):
                        scalars[value.tag, event.step] = float(tensorflow.make_ndarray(value.tensor))
        return scalars, tags

    x, y = data()
    how = {**HOW, "shuffle": False, "validation_split": 0.2}
    make_model().fit(x, y, callbacks=[keras.callbacks.TensorBoard(tmp_path / "plain", write_graph=False)], **how)
    board = keras.callbacks.TensorBoard(tmp_path / "ours", write_graph=False, histogram_freq=1)
    choros.Trainer(make_model(), workers=2, pool=pools(2)).fit(x, y, callbacks=[board], **how)
    for part in ("train", "validation"):
        plain, ours = written(tmp_path / "plain" / part)[0], written(tmp_path / "ours" / part)[0]
        assert {name for name, _ in plain} >= {"epoch_loss", "epoch_accuracy"}
        assert {name: ours[name] for name in plain} == pytest.approx(plain, abs=1e-5)
    assert any("kernel" in tag and "histogram" in tag for tag in written(tmp_path / "ours" / "train")[1])
