"""Law 9: a rank has its cores and its threads before any framework is imported."""

import importlib
import json
import os

import pytest

import choros
from choros.cluster.hardware import plan, usable_cores
from choros.cluster.hardware.thread_env import COUNTS, NAMES

LOOK = """
import os, sys
FRAMEWORKS = ("numpy", "keras", "jax", "torch", "tensorflow")
first = {"cores": sorted(os.sched_getaffinity(0)), "env": dict(os.environ),
         "loaded": [name for name in FRAMEWORKS if sys.modules.get(name)]}

def look(link, message, blobs, fds):
    link.send({"event": "look", **first})

def threads(link, message, blobs, fds):
    import keras
    keras.ops.convert_to_numpy(keras.ops.ones((64, 64)) @ keras.ops.ones((64, 64)))
    framework = keras.backend.backend()
    if framework == "torch":
        import torch
        count = torch.get_num_threads()
    elif framework == "tensorflow":
        import tensorflow
        tensorflow.config.list_logical_devices()
        count = int(os.environ["TF_NUM_INTRAOP_THREADS"])
    else:
        count = len(os.sched_getaffinity(0))
    link.send({"event": "threads", "backend": framework, "count": count})
"""


@pytest.fixture
def call(tmp_path, monkeypatch, request):
    """Ask every worker of a pool; the module is on the path before the workers start."""
    (tmp_path / "law_nine.py").write_text(LOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def ask(pool, function):
        engine, answers = pool.start(), {}
        for rank in range(pool.size):
            engine.call(rank, f"law_nine:{function}", {})
        while len(answers) < pool.size:
            rank, event, _ = engine.receive(90)
            assert event["event"] == function, event
            answers[rank] = event
        return [answers[rank] for rank in sorted(answers)]

    return ask


def test_the_workers_of_a_pool(call, backend):
    with choros.WorkerPool(2, echo=False) as pool:
        for seen, binding in zip(call(pool, "look"), plan(2), strict=True):
            assert seen["loaded"] == []  # nothing yet, and all is set
            assert seen["cores"] == list(binding.cores or usable_cores())
            assert {seen["env"][name] for name in COUNTS} == {str(binding.threads)}
            assert seen["env"]["KERAS_BACKEND"] == backend
        for seen, binding in zip(call(pool, "threads"), plan(2), strict=True):
            assert seen["backend"] == backend
            assert seen["count"] == binding.threads or not binding.cores


def test_what_the_user_says_holds(call):
    with choros.WorkerPool(2, threads=3, bind=False, echo=False) as pool:
        for seen in call(pool, "look"):
            assert seen["cores"] == list(usable_cores())
            assert seen["env"]["OMP_NUM_THREADS"] == seen["env"]["NPROC"] == "3"


def test_what_the_user_exported_holds(call, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with choros.WorkerPool(1, echo=False) as pool:
        (seen,) = call(pool, "look")
        assert seen["env"]["OMP_NUM_THREADS"] == "2"


def test_the_ranks_of_choros_run(clean_python, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    text = LOOK.partition("def look")[0] + "\nimport json\nprint(json.dumps(first), flush=True)\n"
    done = clean_python(text, before=("-m", "choros", "run", "-n", "2"))
    assert done.returncode == 0, done.stderr
    ranks = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()}
    for rank, binding in enumerate(plan(2)):
        seen = ranks[f"[{rank}]"]
        assert seen["loaded"] == []
        assert seen["cores"] == list(binding.cores or usable_cores())
        assert seen["env"]["OMP_NUM_THREADS"] == seen["env"]["TF_NUM_INTRAOP_THREADS"] == str(binding.threads)
    assert "CHOROS_CORES" not in os.environ
