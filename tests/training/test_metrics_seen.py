"""Metrics that callbacks read from the model: the figures of all workers, as in Keras' own loop."""

import keras
import numpy as np
import pytest

import choros

K = keras.callbacks


class Reads(K.Callback):
    """Notes what the metrics hold in one hook; with weights or without."""

    def __init__(self, hook):
        super().__init__()
        self.seen, self.logs = [], []
        setattr(self, hook, self.look)

    def look(self, number, logs=None):
        self.logs.append(dict(logs or {}))
        self.seen.append(np.concatenate([np.ravel(np.asarray(v, "float64")) for v in self.results()]))

    def results(self):
        for metric in self.model.metrics:
            unbuilt = not getattr(metric, "built", True)  # before the first batch on TensorFlow
            result = [0.0, 0.0] if unbuilt else metric.result()
            yield from result.values() if isinstance(result, dict) else np.ravel(result)


def make(make_model):
    return make_model(metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")])


def rows_of(data):
    x, y = data(60)
    return x, y, np.linspace(0.5, 1.5, 60).astype("float32")


@pytest.mark.parametrize(
    ("hook", "validated"),
    [
        ("on_train_batch_begin", False),
        ("on_train_batch_end", True),
        ("on_epoch_begin", False),
        ("on_epoch_end", False),
        ("on_epoch_end", True),
    ],
)
def test_metrics_hold_what_plain_keras_would_show(hook, validated, make_model, data, pools):
    x, y, weight = rows_of(data)
    how = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False, "sample_weight": weight}
    if validated:
        how |= {"validation_data": (x[:20], y[:20])}
    expected, reads = Reads(hook), Reads(hook)
    make(make_model).fit(x, y, callbacks=[expected], **how)
    choros.Trainer(make(make_model), workers=2, pool=pools(2)).fit(x, y, callbacks=[reads], **how)
    assert len(reads.seen) == len(expected.seen) > 0
    np.testing.assert_allclose(reads.seen, expected.seen, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["localsgd", "aeasgd"])
def test_an_epoch_s_end_shows_the_metrics_of_all_workers(algorithm, make_model, data, pools):
    x, y, _ = rows_of(data)
    reads = Reads("on_epoch_end")
    trainer = choros.Trainer(make(make_model), algorithm, workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[reads])
    for seen, logs in zip(reads.seen, reads.logs, strict=True):
        np.testing.assert_allclose(seen, [logs["loss"], logs["accuracy"], logs["entropy"]], atol=1e-5)


@pytest.mark.parametrize(("algorithm", "hook"), [("allreduce", "on_train_batch_end"), ("downpour", "on_epoch_end")])
def test_ranks_of_a_launcher_show_them_too(algorithm, hook, make_model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y, weight = rows_of(data)
    how = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False, "sample_weight": weight}
    expected, reads = Reads(hook), Reads(hook)
    make(make_model).fit(x, y, callbacks=[expected], **how)
    launcher = choros.Ssh("localhost:2")
    trainer = choros.Trainer(make(make_model), algorithm, workers=2, launcher=launcher, timeout=60, first_timeout=120)
    trainer.fit(x, y, callbacks=[reads], **how)
    if algorithm == "allreduce":
        np.testing.assert_allclose(reads.seen, expected.seen, atol=1e-5)
    for seen, logs in zip(reads.seen, reads.logs, strict=True):
        np.testing.assert_allclose(seen, [logs["loss"], logs["accuracy"], logs["entropy"]], atol=1e-5)


class Resets(K.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.model.reset_metrics()


def test_a_callback_may_reset_them_in_the_middle_of_an_epoch(make_model, data, pools, same_history):
    x, y, weight = rows_of(data)
    how = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False, "sample_weight": weight}
    plain = make(make_model).fit(x, y, callbacks=[Resets()], **how)
    ours = choros.Trainer(make(make_model), workers=2, pool=pools(2)).fit(x, y, callbacks=[Resets()], **how)
    same_history(ours, plain)


def test_ranks_that_meet_rarely_reset_theirs_too(make_model, data, pools):
    """Both forget the first 4 of 8 batches: the accuracy is of half of the rows."""
    x, y, _ = rows_of(data)
    model, reads = make(make_model), Reads("on_epoch_end")
    trainer = choros.Trainer(model, choros.LocalSGD(window=3), workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Resets(), reads])
    counted = [int(float(metric.count)) for metric in model.metrics[1].metrics]
    assert counted == [60 - 4 * 8] * 2


class ResetsOne(K.Callback):
    def on_train_batch_end(self, batch, logs=None):
        next(metric for metric in self.model.metrics if metric.name == "loss").reset_state()


def test_what_workers_do_not_take_of_metrics_is_warned_about(make_model, data, pools):
    x, y, _ = rows_of(data)
    trainer = choros.Trainer(make(make_model), workers=2, pool=pools(2))
    with pytest.warns(UserWarning, match="A callback has set metrics, which has no effect") as warnings_:
        trainer.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[ResetsOne()])
    assert len([each for each in warnings_ if "A callback has set" in str(each.message)]) == 1


class Errors(keras.metrics.Metric):
    """Gives two figures, as a dict."""

    def __init__(self, name="errors", **how):
        super().__init__(name=name, **how)
        self.total, self.rows = (self.add_weight(name=each, initializer="zeros") for each in ("total", "rows"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.cast(keras.ops.reshape(y_true, (-1, 1)), "float32")
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return {"mean_error": self.total / self.rows, "total_error": 1.0 * self.total}


@pytest.mark.parametrize("watched", [False, True])
def test_a_metric_of_several_figures_is_of_all_workers(watched, make_model, data, pools):
    x, y, _ = rows_of(data)
    how = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    callbacks = [Resets()] if watched else []
    plain = make_model(metrics=[Errors(), "accuracy"]).fit(x, y, callbacks=callbacks, **how)
    trainer = choros.Trainer(make_model(metrics=[Errors(), "accuracy"]), workers=2, pool=pools(2))
    ours = trainer.fit(x, y, callbacks=callbacks, **how)
    assert ours.history.keys() == plain.history.keys()
    for name, figures in plain.history.items():
        np.testing.assert_allclose(ours.history[name], figures, rtol=1e-5, err_msg=name)


class KeptMean(keras.Model):
    """Keeps a running mean that no test step updates, of a number for each row or of one for each batch."""

    def __init__(self, each_row):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        self.kept, self.each_row = keras.metrics.Mean(name="kept"), each_row

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.kept]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = y_pred[:, 0]
        self.kept.update_state(values if self.each_row else keras.ops.mean(values))
        return 0.0 * keras.ops.mean(keras.ops.square(y - y_pred))

    def test_step(self, data=None, *rest):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:The metric")
@pytest.mark.parametrize("each_row", [True, False])
def test_a_running_mean_that_no_test_step_updates_is_the_workers_mean_weighted_by_rows(each_row, pools):
    x = np.arange(20, dtype="float32")[:, None]
    model = KeptMean(each_row)
    model.compile(keras.optimizers.SGD(0.0))
    model(x[:1])
    how = {"batch_size": 12, "epochs": 1, "shuffle": False, "verbose": 0}
    history = choros.Trainer(model, workers=3, pool=pools(3)).fit(x, x, **how).history
    parts = [[x[0:4], x[12:15]], [x[4:8], x[15:18]], [x[8:12], x[18:20]]]  # of each worker, by batch
    of_rows = [np.mean(np.concatenate(part)) for part in parts]
    of_batches = [np.mean([np.mean(batch) for batch in part]) for part in parts]
    expected = np.average(of_rows if each_row else of_batches, weights=[7, 7, 6])
    np.testing.assert_allclose(history["kept"], [expected], rtol=1e-5)
    assert not each_row or np.isclose(expected, 9.5)
