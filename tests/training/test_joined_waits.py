"""Ranks of a job that wait: for a long callback, for a rank that hangs, for a slower one. The same on every backend."""

import subprocess
import sys
import textwrap
import time

import pytest


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_a_callback_longer_than_the_timeout_does_not_end_the_job(hook, algorithm, tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(f"""
            import time
            import keras, numpy as np
            import choros

            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            slow = keras.callbacks.LambdaCallback({hook}=lambda number, logs: time.sleep(8 if number == 1 else 0))
            x = np.ones((64, 4), "float32")
            trainer = choros.Trainer(model, "{algorithm}", timeout=4)
            history = trainer.fit(x, x[:, :1], batch_size=16, epochs=2, callbacks=[slow], verbose=0)
            print("epochs", len(history.history["loss"]))
        """)
    )
    run = [sys.executable, "-m", "choros", "run", "-n", "2", "train.py"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epochs 2") == 2


HANGS = """
    import os, signal, time
    import keras, numpy as np
    import choros
    from choros.cluster import Place

    rank = Place.here().rank

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if rank == {stops}:
                time.sleep({pause})
                if index >= {index}:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = choros.Trainer(model, "aeasgd", timeout=4, first_timeout={first})
    trainer.fit(Batches(), epochs={epochs}, verbose=0, shuffle=False)
    print("ended", rank)
"""


def run_hangs(folder, **how):
    (folder / "train.py").write_text(textwrap.dedent(HANGS.format(**how)))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "train.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)


@pytest.mark.parametrize(("stops", "epochs"), [(1, 200), (0, 1)], ids=["others train", "others wait"])
def test_an_asynchronous_rank_that_hangs_is_named_while_others_train_or_wait(stops, epochs, tmp_path):
    began = time.monotonic()
    done = run_hangs(tmp_path, stops=stops, pause=0.05, index=30, epochs=epochs, first=100)
    assert done.returncode != 0
    assert f"rank {stops} on " in done.stderr
    assert "made no step within 4 s" in done.stderr
    assert time.monotonic() - began < 150


@pytest.mark.long
def test_an_asynchronous_rank_waits_for_slower_ones_as_long_as_they_make_steps(tmp_path):
    done = run_hangs(tmp_path, stops=1, pause=0.7, index=99, epochs=1, first=20)  # 28 s
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 2
