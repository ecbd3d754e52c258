"""Ranks that a launcher started are started again, or told to end, and all go on from the state that is kept here."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import choros
from choros.errors import WorkerFailedError
from choros.training.checkpoint import CheckpointStore

HOW = {"epochs": 4, "batch_size": 10, "seed": 3, "verbose": 0}


def written(flag):
    return flag.exists() and len(flag.read_text()) > 1


def rows_of(flag, pause=0.0, ones=False, wait=False):
    """Batches. At batch 5, rank 1 renames the file ``flag`` to ``died`` and dies, if ``flag`` is there.

    With ``wait``, rank 1 does not go on beyond its second epoch before it has died.
    """
    import keras

    class Rows(keras.utils.PyDataset):
        epochs = 0

        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(pause)
            actual = os.environ.get("CHOROS_RANK", os.environ.get("PMI_RANK"))
            if index == 5 and actual == "1":
                self.epochs += 1
                died = flag.with_name("died")
                while wait and self.epochs == 2 and not died.exists() and not written(flag):
                    time.sleep(0.05)
                if written(flag):
                    flag.rename(died)
                    os.kill(os.getpid(), signal.SIGKILL)
            rng = np.random.default_rng(index)
            x = np.ones((10, 1), "float32") if ones else rng.normal(size=(10, 8)).astype("float32")
            return x, rng.integers(0, 3, 10)

    return Rows()


def when(batch, then, epoch=2):
    """A callback that does something once, in an epoch."""
    import keras

    class Once(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, number, logs=None):
            nonlocal then
            if then is not None and (self.epoch, number) >= (epoch, batch):
                then, do = None, then
                do()

    return Once()


def test_a_rank_that_dies_costs_what_was_not_kept_yet_and_no_bit(make_model, pools, same, same_history, tmp_path):
    flag = tmp_path / "flag"
    ours, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    other = choros.Trainer(plain, workers=2, pool=pools(2)).fit(rows_of(flag), **HOW)
    trainer = choros.Trainer(ours, workers=2, launcher="mpiexec", restarts=1)
    die = when(1, lambda: flag.write_text("die"))
    history = trainer.fit(rows_of(flag), callbacks=[die], checkpoint=choros.Checkpoint(tmp_path / "state", 3), **HOW)
    same(ours, plain, 0)
    same([np.array(v) for v in ours.optimizer.variables], [np.array(v) for v in plain.optimizer.variables], 0)
    same_history(history, other, 0)
    (restart,) = history.run.restarts
    assert (restart.rank, restart.signal) == (1, "SIGKILL")
    # Rank 1 may read batch 5 of epoch 2 before or after the callback writes the flag, and its state may not be written.
    assert restart.epoch in (1, 2, 3)
    assert CheckpointStore(tmp_path / "state").latest().facts["epoch"] == 4


def test_ranks_that_wait_for_nobody_count_each_step_once(tmp_path):
    import keras

    def mean(truth, prediction):  # a loss whose gradient is 1: the weight counts the steps
        return keras.ops.mean(prediction, axis=-1) + 0 * keras.ops.mean(truth, axis=-1)

    flag = tmp_path / "flag"
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(1 / 64), mean)
    rule = choros.DOWNPOUR(window=3)
    trainer = choros.Trainer(model, rule, workers=2, launcher=choros.Ssh("localhost:2"), restarts=2)
    # A second later, so that the state of epoch 0 has arrived. Rank 1 waits for the flag.
    die = when(1, lambda: threading.Timer(1.0, flag.write_text, ["die"]).start(), epoch=1)
    history = trainer.fit(rows_of(flag, ones=True, wait=True), callbacks=[die], **HOW)
    (restart,) = history.run.restarts
    assert restart.epoch > 0
    assert history.epoch == [0, 1, 2, 3]
    steps = -64 * float(np.array(model.get_weights()[0]).item())
    assert steps == pytest.approx(2 * 4 * 8, abs=1e-3)  # one more or less would be a whole one


def test_a_warning_here_ends_all_in_a_checkpoint_from_which_they_go_on(make_model, pools, same, tmp_path):
    flag, where = tmp_path / "flag", tmp_path / "state"
    launcher = choros.Ssh("localhost:2")
    ours, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    choros.Trainer(plain, workers=2, pool=pools(2)).fit(rows_of(flag), **HOW)
    warn = when(2, lambda: signal.raise_signal(signal.SIGTERM), epoch=1)
    with pytest.raises(SystemExit) as ended:
        choros.Trainer(ours, workers=2, launcher=launcher).fit(
            rows_of(flag, pause=0.1), callbacks=[warn], checkpoint=where, **HOW
        )
    assert ended.value.code == 75
    facts = CheckpointStore(where).latest().facts
    assert (1, 2) <= (facts["epoch"], facts["batch"]) < (4, 0)
    second = make_model(dropout=0.3, seed=5)
    history = choros.Trainer(second, workers=2, launcher=launcher).fit(
        rows_of(flag), checkpoint=where, resume=True, **HOW
    )
    assert history.epoch == list(range(facts["epoch"], 4))
    same(second, plain, 0)


def test_what_does_better_no_second_time_is_not_tried_again(make_model, tmp_path):
    launcher = choros.Ssh("nowhere.invalid:2", command="false")
    trainer = choros.Trainer(make_model(), workers=2, launcher=launcher, restarts=3)
    with pytest.raises(WorkerFailedError, match="ended with code") as failed:
        trainer.fit(rows_of(tmp_path / "flag"), **HOW)
    assert failed.value.rank == 0
