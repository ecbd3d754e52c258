"""Workers by default: one for each GPU that the installed build can use, with a device of its own and no more memory
than it needs. The driver's list and the build are faked; the processes and their environments are real."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import choros
from choros.cluster.hardware import gpus, physical_cores
from choros.errors import InvalidInputError, WorkerFailedError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make this a machine with so many GPUs, which the installed build of each backend can use or not."""
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "KERAS_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)

    def has(count, build="nvidia"):
        lines = [f"echo 'GPU {number}: NVIDIA H100 (UUID: GPU-{number}000)'\n" for number in range(count)]
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(lines))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        for place in ("choros.cluster.hardware.gpus.gpu_vendor", "choros.training.executors.worker_pool.gpu_vendor"):
            monkeypatch.setattr(place, lambda backend, environ=None: build)
        gpus._nvidia.cache_clear()

    yield has
    gpus._nvidia.cache_clear()


def environments(pool):
    """The environment with which each worker runs."""
    with pool:
        texts = [pathlib.Path(f"/proc/{pid}/environ").read_text() for pid in pool.start().pids]
    return [dict(entry.split("=", 1) for entry in text.split("\0") if entry) for text in texts]


def shown(pool):
    return [environment["CUDA_VISIBLE_DEVICES"] for environment in environments(pool)]


def test_one_worker_for_each_gpu_that_the_build_can_use(machine, make_model, monkeypatch):
    cores = min(4, len(physical_cores()))
    machine(3)
    assert choros.Trainer(make_model()).workers == choros.WorkerPool().size == 3
    assert choros.Trainer(make_model(), devices="cpu").workers == choros.WorkerPool(devices="cpu").size == cores
    assert choros.Trainer(make_model(), "single").workers == 1
    assert choros.WorkerPool(devices_per_worker=2).size == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert choros.Trainer(make_model()).workers == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choros.Trainer(make_model()).workers == cores
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    machine(3, build="")  # a backend for processors alone, on the same machine
    assert choros.Trainer(make_model()).workers == choros.WorkerPool().size == cores


def test_each_worker_is_shown_gpus_of_its_own(machine, monkeypatch):
    machine(3)
    assert shown(choros.WorkerPool(2)) == ["0", "1"]
    assert shown(choros.WorkerPool(2, devices_per_worker=[1, 2])) == ["0", "1,2"]
    assert shown(choros.WorkerPool(2, devices="cpu")) == ["", ""]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,0")
    assert shown(choros.WorkerPool(2)) == ["GPU-2", "0"]


def test_workers_on_pytorch_compute_on_the_cpu_if_told_so_whatever_gpus_keras_finds(machine):
    for vendor in ("intel", "nvidia", ""):
        machine(1, build=vendor)
        for environment in environments(choros.WorkerPool(2, backend="torch", devices="cpu")):
            assert environment["KERAS_TORCH_DEVICE"] == "cpu"


def test_more_workers_than_gpus_are_refused_or_share(machine, make_model, data):
    machine(2)
    trainer = choros.Trainer(make_model(), workers=3)
    with pytest.raises(InvalidInputError, match="3 workers, but 2 GPUs"):
        trainer.fit(*data(), verbose=0)
    assert not trainer._local.pool.started
    with pytest.raises(InvalidInputError, match="3 workers, but 2 GPUs: .*workers=2, devices='shared' .*devices='cpu'"):
        choros.WorkerPool(3).start()
    assert shown(choros.WorkerPool(3, devices="shared")) == ["0", "1", "0"]
    with pytest.raises(InvalidInputError, match="2 workers with 4 devices.*workers=1"):
        choros.WorkerPool(2, devices_per_worker=[1, 3], devices="shared").start()
    machine(0)
    with pytest.raises(InvalidInputError, match="no GPU that the installed jax can use.*devices='cpu'"):
        choros.WorkerPool(2, backend="jax", devices="gpu").start()


def test_the_caller_may_stay_on_the_cpu_while_its_workers_use_gpus(machine, monkeypatch):
    monkeypatch.undo()
    machine(1)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("KERAS_TORCH_DEVICE", "cpu")
    (environment,) = environments(choros.WorkerPool(devices="gpu"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["JAX_PLATFORMS"] == ""
    assert environment["KERAS_TORCH_DEVICE"] == "cuda"


def test_a_worker_whose_backend_sees_no_gpu_says_so(machine, make_model, data):
    machine(1)
    x, y = data()
    with pytest.raises(
        (InvalidInputError, WorkerFailedError), match="was given a GPU, and .* sees none.*devices='cpu'"
    ):
        choros.Trainer(make_model()).fit(x, y, verbose=0)


NAMES = [
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "TF_FORCE_GPU_ALLOW_GROWTH",
]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}, {}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
    ],
)
def test_caller_and_workers_take_memory_as_they_need_it_unless_told_otherwise(values, expected):
    script = f"""
import json, os, pathlib, choros
pool = choros.WorkerPool(1, backend="jax", devices="cpu")
with pool:
    text = pathlib.Path(f"/proc/{{pool.start().pids[0]}}/environ").read_text()
worker = dict(entry.split("=", 1) for entry in text.split("\\0") if entry)
print(json.dumps([{{name: said[name] for name in {NAMES} if name in said}} for said in (os.environ, worker)]))
"""
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environ | values
    )
    assert json.loads(done.stdout) == [values | expected] * 2
