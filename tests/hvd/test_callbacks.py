"""Horovod's callbacks on two ranks: rates, momentum, metrics, checkpoints, state."""

import numpy as np
import pytest

HEAD = """
    x = np.arange(32, dtype="float32").reshape(16, 2) / 10 + rank
    y = np.zeros((16, 1), "float32")

    def make(optimizer=None, **how):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, name="out")])
        how = {"loss": "mse", **how}
        model.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1)), **how)
        return model

    class Seen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rates, self.logs = [], []
        def on_train_batch_end(self, batch, logs=None):
            self.rates.append(float(numbers(self.model.optimizer.learning_rate)))
        def on_epoch_end(self, epoch, logs=None):
            self.logs.append(dict(logs))

    def fit(model, *callbacks, **how):
        seen = Seen()
        given = {"batch_size": 4, "epochs": 3, "verbose": 0, "callbacks": [*callbacks, seen], **how}
        history = model.fit(x, y, **given).history
        return seen, history

    def wrong(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
"""


def test_rates_and_momentum(run):
    script = """
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    seen, history = fit(make(), warm)
    said["warm"] = [seen.rates, history["lr"], [logs["lr"] for logs in seen.logs]]
    halved = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1)
    said["halved"] = fit(make(keras.optimizers.SGD(0.3)), halved)[1]["lr"]
    stairs = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, end_epoch=2)
    said["stairs"] = fit(make(), stairs)[1]["lr"]
    smooth = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False)
    said["smooth"] = fit(make(), smooth, epochs=1)[0].rates
    said["none"] = wrong(lambda: hvd.callbacks.LearningRateScheduleCallback(None, 2.0))
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    said["schedule"] = wrong(lambda: fit(make(keras.optimizers.SGD(decay)), halved))

    # a loss whose gradient is the mean of x: the weights are the sum of the velocities
    for nesterov in (False, True):
        for corrected in (True, False):
            model = make(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov), loss=lambda y, p: p)
            begin = np.ravel(model.get_weights()[0]).tolist()
            twice = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda e: 1 + e, momentum_correction=corrected)
            model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[twice], shuffle=False)
            said[f"momentum {nesterov} {corrected}"] = [begin, np.ravel(model.get_weights()[0]).tolist()]
    """
    results = run(2, HEAD + script)
    rising = [0.225, 0.25, 0.275, 0.3, 0.325, 0.35, 0.375, 0.4, 0.4, 0.4, 0.4, 0.4]
    complete = np.concatenate([np.arange(32).reshape(16, 2) / 10 + rank for rank in range(2)])
    gradient = complete.mean(0)
    for result in results:
        assert result["warm"][0] == pytest.approx(rising)
        assert result["warm"][1] == pytest.approx([0.3, 0.4, 0.4])
        assert result["warm"][2] == pytest.approx([0.3, 0.4, 0.4])
        assert result["halved"] == pytest.approx([0.3, 0.1, 0.05])
        assert result["stairs"] == pytest.approx([0.1, 0.2, 0.2])
        assert result["smooth"] == pytest.approx([0.1, 0.125, 0.15, 0.175])
        assert "initial_lr=None: give the learning rate" in result["none"]
        assert "is a schedule" in result["schedule"]
        for nesterov in (False, True):
            for corrected in (True, False):
                weights, velocity, before = np.array(result[f"momentum {nesterov} {corrected}"][0]), np.zeros(2), 0.1
                for rate in (0.1, 0.2, 0.3):
                    velocity = 0.9 * (rate / before if corrected else 1) * velocity - rate * gradient
                    weights = weights + (0.9 * velocity - rate * gradient if nesterov else velocity)
                    before = rate
                assert result[f"momentum {nesterov} {corrected}"][1] == pytest.approx(weights.tolist(), rel=1e-5)


def test_metrics_checkpoints_and_state(run):
    script = """
    average = hvd.callbacks.MetricAverageCallback

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["own"] = float(rank)

    class Last(keras.metrics.Metric):  # does not add
        def __init__(self, name="last"):
            super().__init__(name=name)
            self.value = self.add_weight(shape=(), initializer="zeros")
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(float(rank))
        def result(self):
            return self.value + 0.0

    # rank 0 has 4 rows of squared error 1, rank 1 has 8 of 9: 19/3 in all
    rows = [4, 8][rank]
    zeros, error = np.zeros((rows, 2), "float32"), np.full((rows, 1), [1.0, 3.0][rank], "float32")
    labels = (np.arange(rows) % 2).reshape(-1, 1)
    for weighted in (True, False):
        model = make(keras.optimizers.SGD(0.0), metrics=["mse", Last()])
        seen, history = fit(model, Own(), average(weighted=weighted), epochs=2, validation_data=(zeros, error))
        last = seen.logs[-1]
        same = all(history[name][-1] == last[name] for name in last)
        said[f"val {weighted}"] = [last["val_loss"], last["val_mse"], last["val_last"], last["own"], same]
        said[f"loss {weighted}"] = last["loss"]
    scores = np.linspace(0, 1, rows).reshape(-1, 1).astype("float32") ** (1 + rank)
    out = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    out.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=[keras.metrics.AUC(name="auc")])
    out.layers[-1].set_weights([np.ones((1, 1))])
    logs = out.fit(scores, labels, batch_size=8, verbose=0, callbacks=[average()]).history
    whole = hvd.allgather(scores), hvd.allgather(labels)
    auc = keras.metrics.AUC()
    auc.update_state(whole[1], whole[0])
    said["auc"] = [logs["auc"][0], float(numbers(auc.result()))]
    said["left"] = "_get_metrics_result_or_logs" in vars(out)

    # the best model is kept by rank 0
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    said["no path"] = wrong(lambda: fit(make(), best, epochs=1))
    best.filepath = os.path.join(os.environ["SAID"], f"best{rank}.keras")
    fit(make(), best, epochs=1)
    said["best"] = os.path.exists(best.filepath)

    # state: commits, what a failure goes back to, and what rank 0 gives to all
    elastic = hvd.elastic
    model = make()
    state = elastic.KerasState(model, batch=0, epoch=rank)
    calls = []
    state.register_reset_callbacks([lambda: calls.append(state.epoch)])

    @elastic.run
    def train(state, fail):
        calls.append(["begin", state.epoch, state.batch])
        callbacks = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state),
                     elastic.CommitStateCallback(state, batches_per_commit=3)]
        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if hasattr(self.model, "jax_state_sync"):
                    self.model.jax_state_sync()
                if fail and self.model.optimizer.iterations == 8:
                    fail.clear()
                    model.set_weights([v * 0 for v in model.get_weights()])
                    raise elastic.HorovodInternalError("drill")
        model.fit(x, y, batch_size=4, epochs=3 - state.epoch, verbose=0, callbacks=[*callbacks, Fail()])
        return state.epoch

    said["trained"] = train(state, [True])
    said["calls"] = calls
    said["steps"] = int(numbers(model.optimizer.iterations))
    told = elastic.ObjectState(batch=0)
    update, said["batches"] = elastic.UpdateBatchStateCallback(told), []
    for _ in range(2):  # interrupted after three batches, then after two more
        update.on_train_begin()
        for batch in range(3 - len(said["batches"])):
            update.on_train_batch_end(batch)
        said["batches"].append(told.batch)
    straight = make()
    straight.fit(x, y, batch_size=4, epochs=1, verbose=0)
    said["unbuilt"] = wrong(lambda: elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])))
    """
    first, second = run(2, HEAD + script)
    for result in (first, second):
        assert result["val True"] == [pytest.approx(19 / 3), pytest.approx(19 / 3), 0.5, 0.5, True]
        assert result["val False"] == [pytest.approx(5.0), pytest.approx(5.0), 0.5, 0.5, True]
        assert result["auc"][0] == pytest.approx(result["auc"][1], abs=1e-6)
        assert result["left"] is False
        assert "has no path" in result["no path"]
        assert result["trained"] == 3
        # the first epoch is committed at its end, the failure in the second goes back to its third batch
        assert result["calls"] == [["begin", 0, 0], 1, ["begin", 1, 3]]
        assert result["steps"] == 4 + 3 + 8
        assert result["batches"] == [3, 5]
        assert "is not built" in result["unbuilt"]
    assert first["loss True"] == second["loss True"]
    assert (first["best"], second["best"]) == (True, False)


def test_backups_and_all_variables_at_once(run):
    """One directory for all ranks: rank 0 backs up, and all go on from there. Every model at once is broadcast."""
    script = """
    class Off(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise OSError("power cut")

    place = os.environ["SAID"] + "/backup"
    backup = lambda: keras.callbacks.BackupAndRestore(place)
    whole = make()
    fit(whole, epochs=4, shuffle=False)
    said["cut"] = wrong(lambda: fit(make(), backup(), Off(), epochs=4, shuffle=False))
    hvd.barrier()
    model = make()
    model.set_weights([v + 5 + rank for v in model.get_weights()])
    seen, history = fit(model, backup(), epochs=4, shuffle=False)
    hvd.barrier()
    said["epochs"] = len(history["loss"])
    said["far"] = float(np.abs(model.get_weights()[0] - whole.get_weights()[0]).max())
    said["gone"] = not os.path.exists(place)

    for one in (model, whole):
        one.set_weights([v + rank for v in one.get_weights()])
    clone = keras.models.clone_model(model)
    said["same names"] = wrong(lambda: hvd.broadcast_global_variables(0))
    del clone, seen
    model.name, whole.name = "one", "two"
    hvd.broadcast_global_variables(1)
    said["weights"] = [numbers(v) for one in (model, whole) for v in one.get_weights()]
    """
    first, second = run(2, HEAD + script)
    for result in (first, second):
        assert "power cut" in result["cut"]
        assert result["epochs"] == 2
        assert result["far"] <= 1e-6
        assert result["gone"]
        assert "give each a name" in result["same names"]
    assert first["weights"] == second["weights"]


def test_a_callback_list_is_taken_as_its_callbacks(run):
    """Its writers write on rank 0 only, the ranks stop together, and a second fit with it works."""
    script = """
    class StopsOnRank1(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = rank == 1 and epoch == 1

    model, seen = make(), Seen()
    path = os.environ["SAID"] + f"/logs{rank}.csv"
    callbacks = keras.callbacks.CallbackList(
        [keras.callbacks.CSVLogger(path), StopsOnRank1(), seen], add_history=True, model=model, epochs=9
    )
    for turn in ("first", "second"):
        history = model.fit(
            x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks, validation_data=(x[:4], y[:4])
        )
        said[turn] = [len(history.epoch), len(seen.logs), history is model.history]
    hvd.barrier()
    said["files"] = sorted(name for name in os.listdir(os.environ["SAID"]) if name.endswith(".csv"))
    """
    for result in run(2, HEAD + script):
        assert result["first"] == result["second"] == [2, 2, True]
        assert result["files"] == ["logs0.csv"]
