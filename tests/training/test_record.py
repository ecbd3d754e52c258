"""The advice after training, and the text of a record."""

import json
import re
import sys
import time
from dataclasses import replace

import keras
import numpy as np
import pytest

import choros
from choros.data import make_source
from choros.errors import InvalidInputError
from choros.training.data_advice import DataKind
from choros.training.run_record import RunRecord
from choros.training.spec import WorkerStats


@pytest.mark.parametrize(
    ("facts", "workers", "output"),
    [
        ({"exchanging": 6.0}, 3, "60% of training for exchange: a larger batch_size or window, or fewer workers"),
        ({"exchanging": 6.0}, 2, "a larger batch_size or window, or one process (model.fit), is faster"),
        ({"exchanging": 4.0}, 2, None),
        ({"seconds": 0.1}, 2, "with so little to train, one process (model.fit) is faster"),
        ({"seconds": 0.1}, 1, None),
        ({"waiting": 4.0}, 1, "40% of training for decode: choros.prefetch reads the next batches while a step runs"),
        ({"waiting": 4.0}, 1, "which saves at most 40% of the time"),
    ],
)
def test_advice(facts, workers, output):
    known = {"steps": 10, "rows": 100, "seconds": 10.0, "startup": 2.0} | facts
    line = RunRecord.of(None, "sync", [WorkerStats(rank, **known) for rank in range(workers)], 0.0, []).summary()
    assert line.startswith(f"choros: {workers} worker")
    advice = line.partition("; ")[2]
    assert advice == "" if output is None else output in advice, line


BUSY = {"steps": 100, "rows": 1000, "seconds": 10.0}


class Slow(keras.utils.PyDataset):
    """Batches that take much longer to read than a step."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        time.sleep(0.05)
        return np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def slow_batches():
    for index in range(10):
        yield Slow()[index]


WAITS = {"waiting": 9.5, "reading": 9.5}  # 95 % of the time


@pytest.mark.parametrize(
    ("data", "facts", "advised", "not_advised"),
    [
        (Slow, WAITS, ["give Slow workers=19 and as large a max_queue_size"], ["prefetch", "files"]),
        (lambda: Slow(workers=4), WAITS, ["give Slow workers=32 (it has 4)"], ["prefetch", "files"]),
        (lambda: Slow(workers=4), {"waiting": 5.0}, ["give Slow workers=8 (it has 4)"], ["prefetch"]),
        (lambda: choros.prefetch(Slow()), WAITS | {"ahead": 2}, ["give Slow workers=20"], ["prefetch", "files"]),
        (slow_batches, WAITS, ["one thread reads the generator", "PyDataset with workers="], ["prefetch", "files"]),
        (lambda: choros.prefetch(slow_batches()), WAITS | {"ahead": 2}, ["the generator"], ["prefetch", "files"]),
        (lambda: np.ones((4, 2)), WAITS, ["in memory", "choros.prefetch", "saves at most 5% of the time"], ["files"]),
        (lambda: np.ones((4, 2)), {"waiting": 9.8}, ["in memory"], ["prefetch", "files"]),
        (lambda: choros.prefetch(np.ones((4, 2)), augment=abs), WAITS | {"ahead": 2}, ["augment"], ["files"]),
    ],
)
def test_the_setting_fits_the_kind_of_the_data(data, facts, advised, not_advised):
    kind = DataKind.of(make_source(data()), read_ahead=True)
    counts = WorkerStats(0, **BUSY | facts)
    (bottleneck,) = replace(RunRecord.of(None, None, [counts], 0.0, []), data=kind).bottlenecks()
    assert bottleneck.cause == "decode"
    assert all(text in bottleneck.remedy for text in advised), bottleneck.remedy
    assert not [text for text in not_advised if f"choros.{text}" in bottleneck.remedy], bottleneck.remedy


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_streams_of_libraries_have_settings_for_readers(library):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    if library == "torch":
        stream = module.utils.data.DataLoader([(1.0, 1.0)] * 4, batch_size=2, num_workers=1)
        advised = "give the DataLoader num_workers=20 (it has 1)"
    else:
        stream = module.data.Dataset.from_tensor_slices(([1.0], [1.0])).batch(1)
        advised = "num_parallel_calls=tf.data.AUTOTUNE"
    kind = DataKind.of(make_source(stream), read_ahead=True)
    record = replace(RunRecord.of(None, None, [WorkerStats(0, **BUSY | WAITS)], 0.0, []), data=kind)
    assert advised in record.bottlenecks()[0].remedy


def test_a_fit_names_the_workers_of_its_dataset():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    run = choros.Trainer(model, workers=1, echo=False).fit(Slow(), verbose=0).run
    assert run.bottlenecks()[0].remedy.startswith("give Slow workers=")
    assert run.to_dict()["data"]["kind"] == "PyDataset"


@pytest.mark.parametrize(
    ("algorithm", "data", "remedy"),
    [
        (choros.AllReduce(), "arrays", "a larger batch_size, or one process (model.fit), is faster"),
        (choros.LocalSGD(), "arrays", "a larger batch_size or window, or one process (model.fit), is faster"),
        (choros.Averaging(), "stream", "a larger global batch, or one process (model.fit), is faster"),
    ],
)
def test_what_makes_exchanges_rare_fits_the_algorithm_and_the_data(algorithm, data, remedy):
    all_stats = [WorkerStats(rank, **BUSY, exchanging=6.0) for rank in range(2)]
    record = replace(RunRecord.of(algorithm, "sync", all_stats, 0.0, []), data=DataKind(data))
    assert record.bottlenecks()[0].remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("mode", "facts", "expected"),
    [
        ("sync", [{}, {}], []),
        ("sync", [{"waiting": 6.0, "reading": 6.0}] * 2, [("decode", 0.6, None, "choros.prefetch reads")]),
        ("sync", [{"copying": 3.0}] * 2, [("copy", 0.3, None, "choros.prefetch copies")]),
        (
            "sync",
            [{"waiting": 8.0, "reading": 6.0, "copying": 2.0, "ahead": 2}] * 2,
            [("decode", 0.6, None, "faster disk"), ("copy", 0.2, None, "32 bits")],
        ),
        ("sync", [{"exchanging": 4.0}] * 2, [("exchange", 0.4, None, "larger batch_size or window")]),
        (
            "sync",  # rank 1 works for 9 s, rank 0 for 3 s: 6 of the 7 s in rank 0's exchanges are for rank 1
            [{"exchanging": 7.0}, {"exchanging": 1.0}],
            [("slow rank", 0.3, 1, "'aeasgd' does not wait"), ("exchange", 0.1, None, "window")],
        ),
        (
            "sync",
            [{"exchanging": 6.0}, {"waiting": 6.0, "reading": 6.0}],
            [("decode", 0.3, None, "choros.prefetch"), ("slow rank", 0.3, 1, "waits for data: choros.prefetch reads")],
        ),
        ("async", [{}, {"seconds": 5.0}], [("slow rank", 0.25, 0, "end other programs on node0")]),
    ],
)
def test_the_cause_of_waiting_and_the_setting_to_change(mode, facts, expected):
    all_stats = [WorkerStats(rank, host=f"node{rank}", **BUSY | fact) for rank, fact in enumerate(facts)]
    bottlenecks = RunRecord.of(None, mode, all_stats, 0.0, []).bottlenecks()
    assert [(b.cause, pytest.approx(b.share), b.rank) for b in bottlenecks] == [row[:3] for row in expected]
    assert all(row[3] in b.remedy for b, row in zip(bottlenecks, expected, strict=True)), bottlenecks


def record(workers=2, host="n1"):
    counts = [WorkerStats(rank, host=host, exchanging=2.0, waiting=1.0, **BUSY) for rank in range(workers)]
    return RunRecord.of(choros.AEASGD(), "async", counts, 0.0, [(1.0, 0, 0.5), (2.0, 1, 0.25)], "a center")


def test_print_shows_the_summary_and_a_row_for_each_worker():
    first, head, *rows = str(record()).splitlines()
    assert first == record().summary()
    columns = ["rank", "host", "steps", "rows", "samples/s", "exchanging", "waiting for data", "staleness"]
    assert re.split(r"\s{2,}", head.strip()) == columns
    assert [row.split() for row in rows] == [[rank, "n1", "100", "1,000", "100", "20%", "10%", "0.0"] for rank in "01"]


def test_the_summary_says_of_what_its_percentages_are():
    time = "training 10.0 s (200 samples/s), of which 20% exchanging and 10% waiting for data, exchange by a center"
    assert record().summary() == f"choros: 2 workers, start-up and compilation 0.0 s, {time}"


def test_a_run_of_one_step_has_no_speed():
    counts = [WorkerStats(rank, steps=1, rows=5, first_rows=5, seconds=0.1) for rank in range(2)]
    run = RunRecord.of(None, "sync", counts, 1.0, [])
    assert "samples/s" not in run.summary()
    assert "samples/s" not in repr(run)


def test_repr_is_short_and_names_the_views():
    text = repr(record())
    assert text.startswith(
        "<RunRecord of 2 workers, training 10.0 s, 200 samples/s: see print(run), .summary(), .plot()"
    )
    assert len(text) <= 120
    assert all(hasattr(RunRecord, name) for name in re.findall(r"\.([a-z_]+)\(", text))


def test_html_is_escaped():
    page = record(host="<script>")._repr_html_()
    assert page.count("&lt;script&gt;") >= 2
    assert "<script>" not in page
    assert page.count("<tr>") == 3


def test_a_dict_has_json_types():
    values = record().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["algorithm"] == repr(choros.AEASGD())
    assert values["workers"][1]["rank"] == 1
    assert values["losses"] == [[1.0, 0, 0.5], [2.0, 1, 0.25]]


def test_the_plot_has_the_losses_and_the_workers(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = record().plot()
    loss, speed, time = figure.axes
    assert loss.lines[0].get_xydata().tolist() == [[1.0, 0.5], [2.0, 0.25]]
    assert [bar.get_width() for bar in speed.patches] == [100.0, 100.0]
    assert [round(bar.get_width(), 6) for bar in time.patches] == [0.7, 0.7, 0.2, 0.2, 0.1, 0.1, 0.0, 0.0]
    figure.savefig(tmp_path / "run.svg")


def test_without_matplotlib_plot_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidInputError, match="needs matplotlib: pip install matplotlib"):
        record().plot()


def test_objects_show_their_arguments(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    trainer = choros.Trainer(model, choros.AEASGD(window=4), workers=2)
    assert repr(trainer) == f"Trainer(<Sequential small>, {choros.AEASGD(window=4)!r}, workers=2)"
    ssh = choros.Trainer(model, workers=2, launcher=choros.Ssh("n1:2"))
    assert repr(ssh).endswith(f"workers=2, launcher={choros.Ssh('n1:2')!r})")
    assert repr(choros.WorkerPool(2, backend="jax", threads=1)) == "WorkerPool(2, backend='jax', threads=1)"
    assert repr(choros.Checkpoint(tmp_path, every=100)) == f"Checkpoint({str(tmp_path)!r}, every=100, keep=3)"


def test_a_pool_and_a_trainer_pickle_without_their_processes():
    import cloudpickle

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pool = choros.WorkerPool(2)
    assert not cloudpickle.loads(cloudpickle.dumps(pool)).started
    reloaded = cloudpickle.loads(cloudpickle.dumps(choros.Trainer(model, "aeasgd", pool=pool)))
    assert (reloaded.workers, reloaded.algorithm) == (2, choros.AEASGD())
