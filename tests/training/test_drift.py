"""Ranks whose weights drift apart, numbers that are not finite, slow ranks: each is named."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import choros
from choros.consistency import replica_divergence
from choros.training.run_record import RunRecord
from choros.training.spec import WorkerStats

SCRIPT = """
    import sys
    import keras, numpy as np
    import choros
    from choros.cluster import Place
    from choros.training.worker.loop.sync_loop import SyncLoop
    from choros.training.worker.allreduce_steps import AllReduceSteps

    rank = Place.here().rank
    x = np.random.default_rng(0).normal(size=(60, 8)).astype("float32")
    reduce, meet = AllReduceSteps.__call__, SyncLoop.exchange_weights

    def fit(algorithm, by, **how):
        # a fault of rank 1: its weights change by themselves in the second epoch
        def spoil(loop):
            if rank == 1 and loop.current_batch == (1, 4):
                loop.replica.get(loop.local)
                vector = loop.local if loop.exchange is None else loop.exchange.center
                vector *= 1 + by
                loop.replica.set(vector)

        def reduce_and_spoil(step, batch):
            reduce(step, batch)
            spoil(step.loop)

        def meet_and_spoil(loop):
            meet(loop)
            spoil(loop)

        AllReduceSteps.__call__, SyncLoop.exchange_weights = reduce_and_spoil, meet_and_spoil
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        choros.Trainer(model, algorithm).fit(x, x[:, :1], batch_size=6, epochs=3, verbose=0, **how)
        return [float(np.abs(w).sum(dtype="float64")) for w in model.get_weights()]

    for algorithm, how, when in (
        ("allreduce", {}, "at the end of epoch 2"),
        (choros.EASGD(window=5), {}, "at the end of epoch 2"),
        ("allreduce", {"checkpoint": choros.Checkpoint(sys.argv[1], every=5)}, "in epoch 2 after step 5"),
    ):
        try:
            fit(algorithm, 0.05, **how)
        except (choros.errors.RankMismatchError, choros.errors.PeerLostError) as error:
            assert isinstance(error, choros.errors.RankMismatchError) == (rank == 1), error
            for words in ("rank 1 on ", "of their norm", when, "from those of rank 0 on "):
                assert words in str(error), (words, error)
        else:
            raise AssertionError("not told")
    same = fit("allreduce", 0.0)
    assert np.allclose(same, fit("allreduce", 1e-6), rtol=1e-4)  # told once on stderr, and put right
    print("fine")
"""


def test_a_rank_whose_weights_are_others_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", str(script), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 2
    assert done.stderr.count("in their last bits") == 1, done.stderr


def test_most_ranks_are_right():
    rng = np.random.default_rng(0)
    usual = rng.normal(size=1000).astype("float32")
    other = usual + rng.normal(size=1000).astype("float32")
    rounded = np.nextafter(usual, np.float32(9))
    lost = np.full_like(usual, np.nan)
    result = replica_divergence.compare(
        [replica_divergence.mark(vector) for vector in (other, usual, usual, rounded, lost)]
    )
    assert result.usual == 1
    assert set(result.far) == {0, 4}
    assert 0.3 < result.far[0] < 3.0  # the distance is about the norm
    assert set(result.near) == {3}
    assert (
        replica_divergence.compare([replica_divergence.mark(lost), replica_divergence.mark(-lost)]) is None
    )  # told as not finite, not as drift


def _model(kind="sgd"):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile(kind, "mse")
    return model


@pytest.mark.parametrize(
    "algorithm", ["allreduce", choros.LocalSGD(window=2), choros.AEASGD(window=2), "ensemble"], ids=str
)
def test_who_first_was_not_finite_is_named(algorithm, pools, capfd):
    x = np.random.default_rng(0).normal(size=(80, 8)).astype("float32")
    y = x[:, :1].copy()
    y[33] = np.nan  # unshuffled, of batches of 8: the second row of the fifth
    trainer = choros.Trainer(_model(), algorithm, pool=pools(2))
    run = trainer.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).run
    named = [worker for worker in run.workers if worker.not_finite is not None]
    assert named, run
    assert all(worker.host for worker in run.workers)
    if algorithm == "allreduce":
        assert [(worker.rank, worker.not_finite) for worker in named] == [(0, (0, 4))]
    assert named[0].not_finite[0] == 0
    assert "not finite from epoch 1 on" in run.summary()


def test_each_rank_that_finds_such_numbers_itself_names_itself(capfd):
    """All ranks find them in the same step, as with a learning rate that is too high: none speaks for the others."""
    x = np.ones((16, 8), "float32")
    trainer = choros.Trainer(_model(), workers=2)
    trainer.fit(x, np.full((16, 1), np.nan, "float32"), batch_size=8, epochs=2, verbose=0)
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "is not finite" in line]
    assert len(told) == 2
    for rank in range(2):
        assert sum(f"rank {rank} of 2 on " in line for line in told) == 1
    assert not any("once" in line for line in told)


def test_loss_scaling_leaves_out_steps_without_a_word(pools):
    import keras

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2), initial_scale=2.0**127)
    x = 10 * np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    model = _model(scaled)
    run = choros.Trainer(model, "allreduce", pool=pools(2)).fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).run
    assert float(scaled.dynamic_scale) < 2.0**127  # the first steps were left out
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert all(worker.not_finite is None for worker in run.workers)


@pytest.mark.parametrize(
    ("steps", "slow"), [([20, 20, 20], {}), ([20, 20, 6], {}), ([20, 20, 10], {2: 2.0})], ids=["even", "few", "slow"]
)
def test_a_slow_rank_is_named(steps, slow):
    all_stats = [WorkerStats(rank, steps=n, seconds=10.0, host=f"node{rank}") for rank, n in enumerate(steps)]
    record = RunRecord.of(None, "async", all_stats, 0.0, [])
    assert record.stragglers() == slow
    assert ("rank 2 on node2 takes 2.0 times as long" in record.summary()) == bool(slow)


def test_who_waits_for_callbacks_is_not_slow(pools):
    import time

    import keras

    # One epoch: the callbacks of a rank that is an epoch ahead run later, and it does not wait for them.
    slowly = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.03))
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    trainer = choros.Trainer(_model(), "aeasgd", pool=pools(2))
    first, second = trainer.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0, callbacks=[slowly]).run.workers
    assert first.calling * first.seconds >= 0.03 * (first.steps - 1)  # the first step counts as start-up
    assert second.calling == 0.0
    assert first.step_seconds < 0.03 < first.seconds / first.steps
