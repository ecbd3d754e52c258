"""Threads of ranks that a launcher without Choros starts: they follow the rank's cores before the backend starts."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from choros.cluster import Place
from choros.cluster.hardware import usable_cores
from choros.cluster.hardware.thread_env import NAMES
from choros.cluster.rank_threads import missing_variables, shares_cores

CORES = usable_cores()
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="with one core every framework runs one thread anyway")
SHOW = f"""
import json, os, sys
def threads(name):
    tasks = os.listdir("/proc/self/task")
    return sum(open(f"/proc/self/task/{{task}}/comm").read().strip() == name for task in tasks)
def show(count):
    print(json.dumps([count, {{name: os.environ.get(name) for name in {NAMES!r}}}]))
"""
FRAMEWORKS = {
    "jax": """
        import choros, jax, jax.numpy as jnp
        jax.jit(lambda a: a @ a)(jnp.ones((64, 64))).block_until_ready()
        show(threads("tf_XLAEigen"))
        """,
    "torch": """
        import torch, choros
        show(torch.get_num_threads())
        """,
    "tensorflow": """
        import tensorflow as tf, choros
        tf.function(lambda a: a @ a)(tf.ones((64, 64)))
        show(threads("tf_Compute"))
        """,
}


def rank(script, cores=CORES, size=0, **environ):
    """Run a script as rank 0 of a host's ranks, with the variables of Open MPI; return what ``show`` printed."""
    size = size or len(CORES)
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    place = {f"OMPI_COMM_WORLD_{name}": str(size if "SIZE" in name else 0) for name in names}
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {sorted(cores)})\n{SHOW}{textwrap.dedent(script)}"],
        env={**clean, **place, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("framework", ["jax", "torch", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_ranks_on_common_cores_divide_them(framework):
    """One rank for each core: one thread each, where a process alone has one for each core."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    count, environ = rank(FRAMEWORKS[framework])
    assert count == 1
    assert environ["OMP_NUM_THREADS"] == environ["TF_NUM_INTRAOP_THREADS"] == environ["NPROC"] == "1"
    assert (environ["KMP_BLOCKTIME"], environ["KMP_AFFINITY"]) == ("0", "none")


def test_a_rank_with_cores_of_its_own_uses_them():
    """The launcher, here this test, has more cores than the rank, which may be below a shell."""
    script = "import choros, numpy; show(0)"
    _, environ = rank(script, cores=CORES[:1])
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    shell = f"import subprocess; subprocess.run(['sh', '-c', '{sys.executable} -c \"$SCRIPT\"; true'])"
    _, environ = rank(shell, cores=CORES[:1], SCRIPT=SHOW + script)
    assert environ["KMP_AFFINITY"] == "granularity=fine,compact,1,0"


def test_what_the_user_has_set_stays():
    _, environ = rank("import choros, numpy; show(0)", KMP_BLOCKTIME="30", KMP_AFFINITY="scatter", OMP_NUM_THREADS="3")
    assert [environ[name] for name in ("KMP_BLOCKTIME", "KMP_AFFINITY", "OMP_NUM_THREADS")] == ["30", "scatter", "3"]
    assert environ["NPROC"] == "1"


def test_one_rank_is_left_alone():
    _, environ = rank("import choros, numpy; show(0)", size=1)
    assert set(environ.values()) == {None}
    assert missing_variables(Place()) == {}


def test_the_allocation_of_slurm_says_whether_a_rank_is_bound(monkeypatch):
    place = Place(0, 2, 0, 2, launcher="slurm")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(len(CORES)))
    assert shares_cores(place)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(2 * len(CORES)))
    assert not shares_cores(place)
    assert missing_variables(place, {})["KMP_AFFINITY"] == "granularity=fine,compact,1,0"


def test_init_and_trainer_set_them_where_a_framework_was_there_first(tmp_path):
    pytest.importorskip("torch")
    script = """
    import keras, torch
    import choros, choros.hvd as hvd

    def unset():
        for name in names:
            os.environ.pop(name, None)
        torch.set_num_threads(2)

    unset()
    hvd.init()
    counts = [torch.get_num_threads()]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    unset()
    choros.Trainer(model)
    show([*counts, torch.get_num_threads()])
    """
    path = tmp_path / "script.py"
    path.write_text(f"{SHOW}\nnames = {NAMES!r}\n{textwrap.dedent(script)}")
    command = [sys.executable, "-m", "choros", "run", "-n", str(len(CORES)), "--no-bind", str(path)]
    done = subprocess.run(
        command, env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        counts, environ = json.loads(line.partition("] ")[2])
        assert counts == [1, 1]
        assert environ["NPROC"] == "1"
