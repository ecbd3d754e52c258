"""Under what stands in for PALS' ``mpiexec`` (Polaris, Aurora): its options and variables, on this machine.

It starts processes and says their places, and is no launcher of this machine's MPI; so the ranks meet by sockets.
"""

import json
import os
import pathlib
import re
import secrets
import subprocess
import sys

import pytest

STANDS_IN = pathlib.Path(__file__).parents[3] / "shared" / "testbed" / "pals_mpiexec.py"
pytestmark = pytest.mark.skipif(not STANDS_IN.exists(), reason=f"{STANDS_IN} is not here, which stands in for PALS")

TRAIN = """
import os, sys
import json
import keras
import numpy as np
import choros
import choros.hvd as hvd

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
trainer = choros.Trainer(model, choros.AEASGD(window=2))
losses = trainer.fit(x, x[:, 0], batch_size=12, epochs=2, verbose=0).history["loss"]
assert losses[1] < losses[0]
hvd.init()
weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
assert weights == weights[:1] * 2
place = choros.cluster.Place.here()
print("trained " + json.dumps([place.rank, place.size, place.local_rank, place.launcher]), flush=True)
if hvd.rank() == 1 and sys.argv[1:]:
    sys.exit(7)
"""
PLACES = [[rank, 2, rank, "pals"] for rank in range(2)]


@pytest.fixture
def job(tmp_path):
    """Return a function that runs a command in a scheduler's job on this machine alone; it has the path of mpiexec."""
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{os.uname().nodename}\n")
    mpiexec = tmp_path / "mpiexec"
    output = 'if [ "$1" = --version ]; then echo "mpiexec (PALS)"; exit; fi'
    mpiexec.write_text(f'#!/bin/sh\n{output}\nexec {sys.executable} {STANDS_IN} "$@"\n')
    mpiexec.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    sockets = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), "CHOROS_COORDINATOR": "127.0.0.1"}

    def run(*command, code=0, **environment):
        there = {**os.environ, "OMP_NUM_THREADS": "1", "PBS_NODEFILE": str(nodes), **sockets, **environment}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=90, env=there, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.mpiexec, run.sockets = mpiexec, {**sockets, "PBS_NODEFILE": str(nodes)}
    return run


@pytest.mark.parametrize("without", [[], ["env", "-u", "PMI_SIZE"]], ids=["size told", "no size, as by PMIx"])
def test_where(job, tmp_path, without):
    where = f"{sys.executable} -m choros where --json > where.$PALS_RANKID"
    job(job.mpiexec, "-n", "2", *without, "sh", "-c", where, CHOROS_COMM="")
    for rank in range(2):
        result = json.loads((tmp_path / f"where.{rank}").read_text())
        place = result["place"]
        assert (place["size"], place["local_rank"], place["local_size"], place["launcher"]) == (2, rank, 2, "pals")
        assert (place["node"], place["nodes"], place["hosts"]) == (0, 1, [os.uname().nodename])
        assert f"PALS_RANKID={rank}" in result["why"]
        assert result["group"].startswith("MPI, as pals started the ranks")


def test_a_trainer(job):
    output = job(job.mpiexec, "-n", "2", sys.executable, "train.py")
    assert sorted(json.loads(text) for text in re.findall(r"trained (\[.*?\])", output)) == PLACES


def test_choros_run(job):
    run = [sys.executable, "-m", "choros", "run", "-n", "2", "--launcher", job.mpiexec, "train.py"]
    output = job(*run)
    assert sorted(json.loads(text) for text in re.findall(r"trained (\[.*?\])", output)) == PLACES
    assert f"rank 1 (host {os.uname().nodename}) ended with code 7" in job(*run, "fail", code=7)


def test_an_mpi_that_is_not_the_launcher_s_is_refused(job, mpiexec):
    """As Aurora's it has PMIx, without which MPICH's ranks would each be alone."""
    text = "import choros.hvd as hvd; hvd.init()"
    output = job(job.mpiexec, "-n", "2", sys.executable, "-c", text, code=1, CHOROS_COMM="")
    assert f"Start the ranks with {mpiexec.path}, which belongs to" in output


def test_a_rank_that_raises(job, failing):
    failing([job.mpiexec, "-n", "2", sys.executable], "trainer", **job.sockets)


def test_the_line_for_an_aprun(job, tmp_path):
    """The line that ``choros run --launcher aprun`` prints runs as it is: two ranks with variables, arguments."""
    look = 'print(*(os.environ[name] for name in ("PALS_RANKID", "PMI_LOCAL_SIZE", "A")), sys.argv[1:])'
    (tmp_path / "look.py").write_text(f"import os, sys\n{look}\n")
    options = ["-n", "2", "-N", "2", "-d", "1", "-j", "1", "-cc", "depth", "-e", "A=b c"]
    error = job(sys.executable, "-m", "choros", "run", "--launcher", "aprun", *options, "look.py", "x y", code=2)
    [line] = [line.strip() for line in error.splitlines() if line.startswith("    mpiexec ")]
    path = f"{job.mpiexec.parent}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    assert sorted(job("sh", "-c", line, PATH=path).splitlines()) == ["0 2 b c ['x y']", "1 2 b c ['x y']"]
