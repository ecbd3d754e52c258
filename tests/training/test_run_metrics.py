"""Figures of the workers in the logs of epochs."""

import csv
import time
import warnings

import keras
import numpy as np
import pytest

import choros
from choros.callbacks import RunMetrics
from choros.training.spec import EpochCounts, WorkerStats, epoch_rates

FIGURES = {"samples_per_second", "exchanging", "waiting"}


class SlowData(keras.utils.PyDataset):
    """Eight batches of four rows. Each takes 50 ms."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.05)
        return np.ones((4, 8), "float32"), np.zeros(4, "int64")


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "aeasgd", "ensemble"])
def test_logs_of_each_epoch_have_the_figures_of_all_workers(algorithm, make_model, data, pools, tmp_path):
    x, y = data(64)
    table = tmp_path / "table.csv"
    trainer = choros.Trainer(make_model(), algorithm, workers=2, pool=pools(2))
    callbacks = [RunMetrics(), keras.callbacks.CSVLogger(str(table))]
    how = {"batch_size": 16, "epochs": 2, "verbose": 0, "validation_split": 0.25}
    history = trainer.fit(x, y, callbacks=callbacks, **how).history
    figures = FIGURES | ({"staleness"} if algorithm == "aeasgd" else set())
    assert figures <= history.keys()
    assert ("staleness" in history) == ("staleness" in figures)
    assert all(len(history[name]) == 2 for name in figures)
    assert all(0 <= share <= 1 for name in ("exchanging", "waiting") for share in history[name])
    assert history["samples_per_second"][1] > 0
    with open(table) as file:
        assert figures <= set(next(csv.DictReader(file)))
    assert not figures & trainer.fit(x, y, **how).history.keys()


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_the_figures_show_that_workers_wait_for_data(algorithm, make_model, pools):
    trainer = choros.Trainer(make_model(), algorithm, workers=2, pool=pools(2))
    history = trainer.fit(SlowData(), epochs=2, verbose=0, callbacks=[RunMetrics()]).history
    assert 0.3 < history["waiting"][1] <= 1
    # Two workers read their batches at the same time, one every 50 ms: at most 160 rows in a second.
    assert 0 < history["samples_per_second"][1] < 200


def test_one_worker(make_model, data):
    x, y = data(64)
    history = choros.Trainer(make_model(), workers=1).fit(x, y, epochs=2, verbose=0, callbacks=[RunMetrics()]).history
    assert history.keys() >= FIGURES
    assert history["samples_per_second"][1] > 0


def test_a_run_resumes_with_figures_that_it_did_not_have_before(make_model, data, pools, tmp_path):
    x, y = data(64)
    trainer = choros.Trainer(make_model(), "aeasgd", workers=2, pool=pools(2))
    how = {"batch_size": 16, "verbose": 0, "checkpoint": tmp_path}
    trainer.fit(x, y, epochs=1, **how)
    history = trainer.fit(x, y, epochs=3, resume=True, callbacks=[RunMetrics()], **how)
    assert history.epoch == [1, 2]
    assert len(history.history["staleness"]) == 2


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_ranks_of_a_launcher(algorithm, make_model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = data(64)
    trainer = choros.Trainer(make_model(), algorithm, workers=2, launcher=choros.Ssh("localhost:2"))
    history = trainer.fit(x, y, epochs=2, verbose=0, callbacks=[RunMetrics()]).history
    assert history.keys() >= FIGURES
    assert history["samples_per_second"][1] > 0


def test_the_first_step_of_a_shape_does_not_count():
    begin = WorkerStats(0, rows=100, first_rows=10, seconds=5.0, exchanging=1.0, waiting=0.5, exchanges=3, staleness=2)
    end = WorkerStats(0, rows=200, first_rows=20, seconds=7.0, exchanging=1.5, waiting=0.6, exchanges=5, staleness=6)
    counts = EpochCounts.between(begin, end)
    assert counts.rows == 90
    rates = epoch_rates(2 * np.array(counts.numbers()), 2, asynchronous=True)
    assert rates["samples_per_second"] == 2 * 90 / 2.0
    assert (rates["exchanging"], rates["staleness"]) == (0.25, 2.0)
    assert rates["waiting"] == pytest.approx(0.05)


def test_no_steps_and_no_exchanges_divide_by_nothing():
    assert set(epoch_rates([0] * 6, 2, asynchronous=True).values()) == {0.0}


def test_plain_fit_has_no_figures_and_one_warning(make_model, data):
    x, y = data(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = make_model().fit(x, y, epochs=2, verbose=0, callbacks=[RunMetrics()])
    assert [str(warning.message) for warning in caught if "RunMetrics" in str(warning.message)] == [
        "RunMetrics adds figures in the fit of a choros.Trainer only: this fit has none."
    ]
    assert not FIGURES & history.history.keys()
