"""Ranks of one MPI job on two machines, which are namespaces of this one; a script stands in for ssh."""

import json
import os
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("CHOROS_PRIVILEGED_TESTS"),
    reason="needs privileges: .ci/run sets CHOROS_PRIVILEGED_TESTS=1",
)

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts --ipc --pid --mount-proc --fork --kill-child sh -c "hostname $host; $*"
"""
SCRIPT = """
import json, os, sys
import keras
import numpy as np
import choros
import choros.hvd as hvd

hvd.init()
rank = hvd.rank()
said = [os.uname().nodename, hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
said.append(hvd.is_homogeneous())
total = hvd.allreduce(np.arange(100_000.0) * (rank + 1), op=hvd.Sum)
assert np.array_equal(total, np.arange(100_000.0) * 10)
across = hvd.add_process_set([3, 0])  # one of each machine
if across.included():
    assert float(hvd.allreduce(np.ones(1) * rank, op=hvd.Sum, process_set=across)[0]) == 3
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    choros.Trainer(model).fit(np.zeros((8, 4)), np.zeros(8), verbose=0)
except choros.BadInput as error:
    said.append(str(error))
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(said, file)
"""


def test_ranks_of_two_machines_meet_by_mpi_alone(mpiexec, tmp_path):
    ssh, script = tmp_path / "ssh", tmp_path / "script.py"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    script.write_text(SCRIPT)
    mpich = ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", "one:2,two:2"]
    how = ["--prtemca", "plm_ssh_agent", ssh, "--host", "one:2,two:2"] if mpiexec.open else mpich
    mpiexec(4, sys.executable, script, tmp_path, more=how)
    for rank in range(4):
        *place, refused = json.loads((tmp_path / f"{rank}.json").read_text())
        assert place == [["one", "two"][rank // 2], 4, place[2], 2, rank // 2, 2, True]
        assert "takes one machine: ranks 0, 1 on one, ranks 2, 3 on two" in refused
        assert "choros.hvd" in refused
