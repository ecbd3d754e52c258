"""``choros.submit`` on a real SLURM: two nodes train one model, and the results return to the caller."""

import sys

TRAIN = """
import keras, numpy as np
import choros

def train(units):
    import os
    import keras, numpy as np
    x = np.random.default_rng(7).normal(size=(123, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    history = choros.Trainer(model).fit(x, x[:, 0], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return os.uname().nodename, [w.copy() for w in model.get_weights()], history.history["loss"]

if __name__ == "__main__":
    job = choros.submit(train, (8,), nodes=2, ranks_per_node=2, time="10m", env={"JAX_PLATFORMS": "cpu"})
    results = job.results(240)
    alone = train(8)
    print("nodes", *sorted({node for node, _, _ in results}))
    for _, weights, losses in results:
        np.testing.assert_allclose(losses, alone[2], rtol=1e-5)
        for one, other in zip(weights, alone[1]):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    print("equal", len(results), job.status())
"""
CANCELLED = """
import time
import choros

if __name__ == "__main__":
    job = choros.submit(time.sleep, (600,), nodes=2, name="sleep")
    while "RUNNING" not in job.status():
        time.sleep(0.2)
    assert not job.done() and job.cancel()
    try:
        job.results(60)
    except choros.errors.SchedulerError as error:
        print(error)
    assert job.done() and not job.cancel()
"""


def test_two_nodes_train_as_one_process_does(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    printed = slurm.run(sys.executable, "train.py", cwd=tmp_path, timeout=280, KERAS_BACKEND="jax")
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["nodes", "equal"], printed
    assert len(lines[-2].split()) == 3
    assert lines[-1].startswith("equal 4 job ")


def test_a_cancelled_job_has_no_results(slurm, tmp_path):
    (tmp_path / "sleep.py").write_text(CANCELLED)
    printed = slurm.run(sys.executable, "sleep.py", cwd=tmp_path, timeout=120, KERAS_BACKEND="jax")
    assert "ended without a result of ranks 0, 1 of 2 (job" in printed
    assert "CANCELLED" in printed
