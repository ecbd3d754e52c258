"""Ranks of one MPI job on two machines, which are namespaces of this one; a script stands in for ssh."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

MODEL = """
import keras
import numpy as np
import choros

rng = np.random.default_rng(0)
x = rng.standard_normal((203, 6)).astype("float32")
y = (x @ rng.standard_normal(6)).astype("float32")

def train(algorithm, *data, batch_size=24, **how):
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(300, "tanh"), keras.layers.Dense(1000, "tanh")]  # so large that hosts divide a center
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    trainer = choros.Trainer(model, algorithm, **how)
    more = {"validation_data": (x[:50], y[:50])}
    done = trainer.fit(*(data or (x, y)), batch_size=batch_size, epochs=3, verbose=0, seed=3, **more)
    history = done.history
    print(f"<{done.run.group}>", flush=True)
    return history, np.concatenate([weight.ravel() for weight in model.get_weights()])
"""
SCRIPT = """
import os, sys
import json
from model import *
import choros.hvd as hvd

hvd.init()
rank, room = hvd.rank(), sys.argv[1]
said = [os.uname().nodename, hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
said += [hvd.is_homogeneous(), hvd.mpi_enabled()]
total = hvd.allreduce(np.arange(100_000.0) * (rank + 1), op=hvd.Sum)
assert np.array_equal(total, np.arange(100_000.0) * 10)
for root in range(4):
    sent = hvd.broadcast(np.full(100_000, rank, "float32"), root)
    assert set(np.asarray(sent)) == {root}
across = hvd.add_process_set([3, 0])  # one of each machine
if across.included():
    assert float(hvd.allreduce(np.ones(1) * rank, op=hvd.Sum, process_set=across)[0]) == 3
three = hvd.add_process_set([0, 1, 3])
if three.included():
    assert set(hvd.allreduce(np.ones(5000) * rank, op=hvd.Sum, process_set=three).tolist()) == {4.0}

def same(weights):
    return len(set(hvd.allgather_object(weights.tobytes()))) == 1

found = {}
files = choros.files(os.path.join(room, "rows.parquet"), x=[f"x{i}" for i in range(6)], y="y")
for name, algorithm, data in [
    ("allreduce", choros.AllReduce(), ()),
    ("files", choros.AllReduce(), (files,)),
    *[(kind.__name__, kind(window=3), ()) for kind in (choros.LocalSGD, choros.EASGD, choros.DiLoCo)],
    *[(kind.__name__, kind(window=3), ()) for kind in (choros.AEASGD, choros.EAMSGD, choros.DOWNPOUR)],
    *[(kind.__name__, kind(window=3), ()) for kind in (choros.AGN, choros.ADAG, choros.DynSGD)],
]:
    if os.environ["CHOROS_COMM"] and name not in ("allreduce", "AEASGD", "DOWNPOUR", "ADAG"):
        continue
    history, weights = train(algorithm, *data)
    found[name] = [history, same(weights)]
    if rank == 0 and name in ("allreduce", "files"):
        np.save(os.path.join(room, f"{name}.npy"), weights)
with open(os.path.join(room, f"{rank}.json"), "w") as file:
    json.dump([said, found], file)
"""
REFERENCE = """
import sys
from model import *
import pyarrow as pa, pyarrow.parquet as pq

pq.write_table(pa.table({f"x{i}": x[:, i] for i in range(6)} | {"y": y}), sys.argv[1] + "/rows.parquet")
history, weights = train("allreduce", workers=1)
np.save(sys.argv[1] + "/one.npy", weights)
"""

THREE = """
import sys
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import json, os
import keras
import numpy as np
import choros
import choros.hvd as hvd

hvd.init()
rank = hvd.rank()
assert np.array_equal(hvd.allreduce(np.arange(100_000.0) * (rank + 1), op=hvd.Sum), np.arange(100_000.0) * 6)
assert set(np.asarray(hvd.broadcast(np.full(100_000, rank, "float32"), 2))) == {2}
x = np.random.default_rng(0).standard_normal((90, 4)).astype("float32")
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses = choros.Trainer(model, algorithm).fit(x, x[:, 0], batch_size=18, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert len({str(w) for w in hvd.allgather_object([w.tolist() for w in model.get_weights()])}) == 1
place = [rank, hvd.size(), os.uname().nodename, hvd.local_size(), hvd.cross_rank(), hvd.mpi_enabled()]
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(place, file)
"""


def test_ranks_of_three_machines_that_share_a_network_alone(mpiexec, network, tmp_path):
    (tmp_path / "three.py").write_text(THREE)
    hosts = ",".join(f"{name}:1" for name in network.names)
    mpich = ["-launcher", "ssh", "-launcher-exec", network.ssh, "-hosts", hosts, "-localhost", network.address]
    how = ["--prtemca", "plm_ssh_agent", network.ssh, "--host", hosts] if mpiexec.open else mpich
    command, needed = mpiexec.starting(3, sys.executable, tmp_path / "three.py", tmp_path, more=how)
    environment = {**os.environ, **needed, "CHOROS_NETWORK": "eth0"}
    job = subprocess.run([*network.head, *command], capture_output=True, text=True, timeout=120, env=environment)
    assert job.returncode == 0, job.stdout + job.stderr
    places = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert places == [[rank, 3, name, 1, rank, True] for rank, name in enumerate(network.names)]


@pytest.mark.timeout(600)  # four ranks on two cores train by each algorithm
@pytest.mark.parametrize("comm", ["", "mpi"])
def test_ranks_of_two_machines_train_by_every_algorithm(mpiexec, ssh, tmp_path, comm):
    """Sums are made in each machine first; a center is divided between them; files are decoded once a machine."""
    for name, text in {"model": MODEL, "script": SCRIPT, "reference": REFERENCE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    subprocess.run([sys.executable, tmp_path / "reference.py", tmp_path], check=True, timeout=120)
    mpich = ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", "one:2,two:2"]
    how = ["--prtemca", "plm_ssh_agent", ssh, "--host", "one:2,two:2"] if mpiexec.open else mpich
    out = mpiexec(4, sys.executable, tmp_path / "script.py", tmp_path, timeout=400, more=how, CHOROS_COMM=comm)
    assert out.count(", vectors by MPI>") == (3 * 4 if comm else 0), out
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, (place, message) in enumerate(facts):
        assert place == [["one", "two"][rank // 2], 4, place[2], 2, rank // 2, 2, True, True]
        assert message == facts[0][1]
    first = np.load(tmp_path / "one.npy")
    assert np.abs(np.load(tmp_path / "allreduce.npy") - first).max() < 1e-5
    for name, (history, same) in facts[0][1].items():
        assert same, name
        assert list(history) == ["loss", "mae", "val_loss", "val_mae"]
        assert history["val_loss"][-1] < 0.7 * history["loss"][0], name
    remaining = subprocess.run(
        ["pgrep", "-f", "choros.training.async_control.shard_server"], capture_output=True, text=True
    ).stdout
    assert not remaining
