"""Jobs that ``choros submit`` gives to a real SLURM: they train, fail, are cancelled, and go on in another turn."""

import re
import shutil
import sys

import pytest

TRAIN = """
import os, sys, time
import keras, numpy as np
import choros.hvd as hvd
from choros.callbacks import BeforeTimeLimit

hvd.init()

class Slowly(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print("epoch", epoch, flush=True)
    def on_train_batch_end(self, batch, logs=None):
        first_turn = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        while limit and first_turn and (self.epoch, batch) == (1, 3) and not limit[0].asked:
            time.sleep(0.05)  # until the signal has come to this rank

rng = np.random.default_rng(7)
x, y = rng.normal(size=(64, 4)).astype("float32"), rng.normal(size=64).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
data = hvd.shard(x, y, per_rank_batch_size=2)
limit = [BeforeTimeLimit("state")] if os.environ.get("LIMIT") else []
model.fit(data, epochs=4, verbose=0, callbacks=[*limit, Slowly()])
print("rank", hvd.rank(), "of", hvd.size(), "on", os.uname().nodename, os.environ["OMP_NUM_THREADS"],
      model.get_weights()[0].tobytes().hex(), flush=True)
"""
FAIL = """
import choros.hvd as hvd
hvd.init()
if hvd.rank() == 2:
    raise RuntimeError("no more room")
hvd.barrier()
"""
DEAF = """
import os, time
print("begun", flush=True)
while not os.path.exists("sent"):
    time.sleep(0.1)
time.sleep(1)
"""
ALGORITHMS = """
import hashlib
import keras, numpy as np
import choros

rng = np.random.default_rng(7)
x = rng.normal(size=(123, 4)).astype("float32")
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2), choros.ADAG(window=2), choros.DynSGD(window=2)):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(600, "tanh"), keras.layers.Dense(600, "tanh"),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    losses = choros.Trainer(model, algorithm).fit(x, x[:, 0], batch_size=16, epochs=3, verbose=0).history["loss"]
    weights = b"".join(w.tobytes() for w in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(type(algorithm).__name__, digest, f"{losses[-1] / losses[0]:.4f}", flush=True)
"""
TWO_BY_TWO = ["--on", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--time", "10m"]


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit a script on two nodes with two ranks each; return the job's number."""

    def run(script, *options, name="train", **environment):
        (tmp_path / f"{name}.py").write_text(script)
        command = ["submit", *TWO_BY_TWO, *options, f"{name}.py"]
        job = slurm.choros(*command, cwd=tmp_path, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", **environment).strip()
        assert job.isdecimal()
        return job

    return run


def test_a_job_trains_on_two_nodes_by_mpi(slurm, submit, tmp_path):
    """MPICH's srun --mpi=pmi2 is chosen by the mpi4py that is installed."""
    job = submit(TRAIN)
    output = slurm.choros("log", "-f", job, cwd=tmp_path)
    assert slurm.until(job, "COMPLETED", "FAILED") == "COMPLETED", output
    assert "--mpi=pmi2" in (tmp_path / "train.slurm.sh").read_text()
    lines = re.findall(r"(\d): rank (\d) of 4 on (n\d) 1 (\w+)", output)
    assert sorted(rank for _, rank, _, _ in lines) == ["0", "1", "2", "3"]
    node = {rank: node for _, rank, node, _ in lines}  # which two nodes are free is up to SLURM
    assert node["0"] == node["1"] < node["2"] == node["3"]
    assert all(label == rank for label, rank, _, _ in lines)
    assert len({weights for *_, weights in lines}) == 1
    assert output.rstrip().endswith("choros: the ranks ended with code 0")
    assert slurm.choros("log", job, cwd=tmp_path) == output
    status = slurm.choros("status", "--on", "slurm", job).strip()
    assert re.fullmatch(rf"job {job} \(train\): COMPLETED, 00:0\d:\d\d of 00:10:00, on n\[\d[-,]\d\]", status)


def test_a_rank_that_fails_ends_the_job_and_says_so_at_the_end(slurm, submit, tmp_path):
    job = submit(FAIL, name="fail")
    output = slurm.choros("log", "-f", job, cwd=tmp_path)
    assert slurm.until(job, "COMPLETED", "FAILED") == "FAILED"
    end = "\n".join(output.splitlines()[-25:])
    assert "2: RuntimeError: no more room" in end
    assert "2: Traceback (most recent call last):" in end
    assert "2: Abort(1) on node 2 (rank 2 in comm 0)" in end
    assert re.search(r"choros: the ranks ended with code [1-9]\d*$", end.rstrip())
    assert re.search(r": FAILED .*exit code [1-9]", slurm.choros("status", job))


def test_ranks_that_would_train_apart_are_refused(slurm, submit, tmp_path):
    job = submit("import choros.hvd as hvd\nhvd.init()\nprint('begun')", "--mpi", "none", name="apart")
    output = slurm.choros("log", "-f", job, cwd=tmp_path)
    assert slurm.until(job, "COMPLETED", "FAILED") == "FAILED"
    assert "is one of 4, says the launcher, but in its group it is rank 0 of 1" in output
    assert "--mpi=pmi2 (MPICH)" in output
    assert "begun" not in output


def test_a_job_is_asked_for_and_cancelled(slurm, submit, tmp_path):
    job = submit("import time; time.sleep(600)", name="sleep")
    slurm.until(job, "RUNNING")
    assert re.match(rf"job {job} \(sleep\): RUNNING, .* on n\[1-2\]", slurm.choros("status", "--on", "slurm", job))
    using = "using slurm (sbatch is on PATH); --on chooses another scheduler"
    assert slurm.choros("cancel", job) == f"choros cancel: {using}\n"
    assert slurm.until(job, "CANCELLED") == "CANCELLED"
    assert "does not report job 99999. scontrol printed: slurm_load_jobs error: Invalid job id" in slurm.choros(
        "status", "99999", check=False
    )
    assert slurm.code == 1


def test_what_slurm_refuses_is_said(slurm, submit, tmp_path):
    (tmp_path / "a.py").touch()
    output = slurm.choros("submit", "--on", "slurm", "--queue", "nothing", "a.py", cwd=tmp_path, check=False)
    assert slurm.code == 1
    line, printed = output.partition("choros submit: error: sbatch refused a.slurm.sh. ")[2].split("\n", 1)
    assert line.endswith("sbatch printed:")
    assert "    sbatch: error: invalid partition specified: nothing\n" in printed


@pytest.mark.timeout(600)
def test_before_its_limit_a_job_saves_and_goes_on_in_its_next_turn(slurm, submit, tmp_path):
    """The signal that SLURM sends by itself comes with the resolution of its clock, a minute: it is sent by hand."""
    job = submit(TRAIN, "--ranks-per-node", "1", LIMIT="1")
    log = tmp_path / f"train-{job}.log"
    slurm.wait(lambda: log.exists() and "0: epoch 1" in log.read_text(errors="replace"), 180)
    slurm.run("scancel", "--signal=USR2", job)
    slurm.wait(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", "--oneliner", job), 120)
    output = slurm.choros("log", "-f", job, cwd=tmp_path)
    assert slurm.until(job, "COMPLETED", "FAILED") == "COMPLETED", output
    first, second = output.split("choros: stopped before the time limit, the state is saved")
    assert re.findall(r"0: epoch (\d)", first) == ["0", "1"]
    assert re.findall(r"0: epoch (\d)", second) == ["1", "2", "3"]
    assert "0: choros: the time limit is near: epoch 2, after " in first
    assert "0: choros: resuming with epoch 2" in second
    assert len(re.findall(r"rank \d of 2", first)) == 0
    assert len(re.findall(r"rank \d of 2 .* (\w+)", second)) == 2
    assert "restarts 1" in slurm.choros("status", job)
    assert not (tmp_path / "state").exists()
    assert not list(tmp_path.glob(".choros-requeue-*"))


def test_a_script_that_does_not_listen_is_not_ended_by_the_signal(slurm, submit, tmp_path):
    job = submit(DEAF, name="deaf")
    log = tmp_path / f"deaf-{job}.log"
    slurm.wait(lambda: log.exists() and log.read_text().count("begun") == 4, 120)
    slurm.run("scancel", "--signal=USR2", job)
    (tmp_path / "sent").touch()
    assert slurm.until(job, "COMPLETED", "FAILED") == "COMPLETED", log.read_text()


def test_each_rank_is_started_by_the_wrapper(slurm, submit, tmp_path):
    assert shutil.which("strace"), "strace is not here: .ci/run installs it"
    wrap = "strace -f -e trace=execve -o trace.%r --"
    job = submit("print('traced', flush=True)", "--wrap", wrap, name="traced")
    assert slurm.until(job, "COMPLETED", "FAILED") == "COMPLETED", (tmp_path / f"traced-{job}.log").read_text()
    traces = sorted(tmp_path.glob("trace.*"))
    assert [path.name for path in traces] == [f"trace.{rank}" for rank in range(4)]
    assert all(f'execve("{sys.executable}", ' in path.read_text() for path in traces)


def test_ranks_are_shown_a_gpu_each(slurm, submit, tmp_path):
    text = "import os; print('gpu', os.environ['SLURM_PROCID'], os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    job = submit(text, "--gpus", "1", name="gpus")
    slurm.until(job, "COMPLETED", "FAILED")
    output = (tmp_path / f"gpus-{job}.log").read_text()
    assert sorted(re.findall(r"gpu (\d) (\d)", output)) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], output


def test_choros_run_by_srun_keeps_the_code_of_the_rank_that_failed(slurm, tmp_path):
    """srun gives the highest code of all; here rank 2 fails with 3, and the others then with 1 or by a signal."""
    (tmp_path / "fail.py").write_text(FAIL.replace('raise RuntimeError("no more room")', "raise SystemExit(3)"))
    run = f"{sys.executable} -m choros run -n 4 --launcher srun"
    out = slurm.run("salloc", "-N2", "-n4", "sh", "-c", f"{run} fail.py; echo code $?", cwd=tmp_path, check=False)
    assert re.search(r"rank 2 \(host n\d\) ended with code 3", out)
    assert "code 3" in out.splitlines(), out


@pytest.mark.timeout(600)
def test_sync_and_async_ranks_of_two_nodes_end_with_the_same_weights(slurm, submit, tmp_path):
    """A sum over both nodes, a center that the first has, and one that both have a part of."""
    job = submit(ALGORITHMS)
    log = slurm.choros("log", "-f", job, cwd=tmp_path, timeout=500)
    assert slurm.until(job, "COMPLETED", "FAILED") == "COMPLETED", log
    for name in ("AllReduce", "AEASGD", "ADAG", "DynSGD"):
        matches = re.findall(rf"(\d): {name} ([0-9a-f]+) (\d\.\d+)", log)
        assert sorted(rank for rank, *_ in matches) == ["0", "1", "2", "3"], log
        assert len({digest for _, digest, _ in matches}) == 1, name
        assert float(matches[0][2]) < 0.9, name


HERE = """
import functools, os
import numpy as np, keras, choros
from scipy.sparse import csr_matrix
class Bare(keras.Model):  # no get_config
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, inputs):
        return self.dense(inputs)
def scaled(y_true, y_pred, scale):
    return scale * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
x = np.random.default_rng(0).standard_normal((80, 4)).astype("float32")
for algorithm in ("allreduce", "dynsgd"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("seen by", os.uname().nodename))
    trainer = choros.Trainer(model, algorithm, launcher="srun")
    history = trainer.fit(x, x[:, 0], batch_size=16, epochs=2, verbose=0, callbacks=[seen])
    print(algorithm, len(history.run.workers), history.history["loss"][1] < history.history["loss"][0], flush=True)
model = Bare()
model.compile("sgd", functools.partial(scaled, scale=0.5))
history = choros.Trainer(model, launcher="srun").fit(csr_matrix(x), x[:, :1], batch_size=16, epochs=2, verbose=0)
print("bare", len(history.run.workers), history.history["loss"][1] < history.history["loss"][0], flush=True)
"""


@pytest.mark.timeout(600)
def test_a_trainer_in_an_allocation_has_its_workers_started_by_srun(slurm, tmp_path):
    (tmp_path / "here.py").write_text(HERE)
    out = slurm.run("salloc", "-N2", "-n4", sys.executable, "here.py", cwd=tmp_path, timeout=500, KERAS_BACKEND="jax")
    assert "allreduce 4 True" in out
    assert "dynsgd 4 True" in out
    assert "bare 4 True" in out
    assert out.count("seen by") == 4
