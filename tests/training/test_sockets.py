"""Ranks that share no launcher of ours and no MPI: torchrun's, and those that only know a secret."""

import json
import os
import pathlib
import secrets
import subprocess
import sys

import pytest

from choros.cluster import Place
from choros.comm.bootstrap.init import _exchange_by_secret
from choros.errors import InvalidInputError

SCRIPT = """
import json, os, sys
import keras
import numpy as np
import choros
import choros.hvd as hvd
from choros.hvd.context import context

hvd.init()
rank, size = hvd.rank(), hvd.size()
rng = np.random.default_rng(0)
x = rng.standard_normal((101, 4)).astype("float32")
y = (x @ rng.standard_normal(4)).astype("float32")
found = {"group": type(context().group).__name__, "mpi": hvd.mpi_enabled()}
found["sum"] = float(hvd.allreduce(np.ones(1) * (rank + 1), op=hvd.Sum)[0])
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    history = choros.Trainer(model, algorithm).fit(x, y, batch_size=12, epochs=2, verbose=0, seed=2).history
    found[type(algorithm).__name__] = [history["loss"], [w.tolist() for w in model.get_weights()]]
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def results_of(folder, size, group):
    """Return the results of the ranks, which are equal."""
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    assert results == [results[0]] * size
    assert results[0]["group"] == group
    assert not results[0]["mpi"]
    assert results[0]["sum"] == sum(range(1, size + 1))
    return results[0]


@pytest.mark.long
def test_torchrun_s_ranks_meet_in_memory_or_by_sockets_with_the_same_weights(script, tmp_path):
    command = [pathlib.Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", script]
    results = []
    for group, more in {"SharedGroup": {}, "TcpGroup": {"CHOROS_COMM": "tcp"}}.items():
        room = tmp_path / group
        room.mkdir()
        subprocess.run([*command, room], check=True, timeout=120, env={**os.environ, **more}, stderr=subprocess.PIPE)
        results.append(results_of(room, 2, group)["AllReduce"])
    assert results[0] == results[1]


def test_ranks_that_know_a_secret_meet_at_the_first_one_s(script, tmp_path):
    """Pods of an Indexed Job, on this machine; no port is told. A stranger of the same rank does not get in."""
    common = {"CHOROS_COMPLETIONS": "3", "CHOROS_COORDINATOR": "127.0.0.1", "CHOROS_COMM": "tcp"}
    common |= {"CHOROS_NETWORK": "lo", "CHOROS_SECRET": secrets.token_hex(32)}
    command = [sys.executable, str(script), str(tmp_path)]
    pods = [
        subprocess.Popen(command, env={**os.environ, **common, "JOB_COMPLETION_INDEX": str(rank)}) for rank in range(3)
    ]
    try:
        assert [pod.wait(120) for pod in pods] == [0, 0, 0]
    finally:
        for pod in pods:
            pod.kill()
    results_of(tmp_path, 3, "TcpGroup")


def test_a_secret_that_is_none_and_hosts_that_nobody_told_are_refused(monkeypatch):
    monkeypatch.setenv("CHOROS_SECRET", "short")
    with pytest.raises(InvalidInputError, match="64 random hexadecimal"):
        _exchange_by_secret(Place(0, 2, 0, 1, launcher="kubernetes"), 0, 2, 1.0)
    monkeypatch.setenv("CHOROS_SECRET", "ab" * 32)
    with pytest.raises(InvalidInputError, match="set CHOROS_COORDINATOR"):
        _exchange_by_secret(Place(0, 2, 0, 1, launcher="kubernetes"), 0, 2, 1.0)
