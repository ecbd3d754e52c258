"""The first measurements on a machine with a GPU: a sub-command for each, which prints JSON.

    python benchmarks/gpu.py all --output gpu.json       # everything below, on each backend, what failed included
    python benchmarks/gpu.py tests --backend jax         # tests/parallel/test_gpus.py and tests/backend, on the GPU
    python benchmarks/gpu.py one_worker --backend jax    # model.fit and Trainer with one worker: CNN and MLP
    python benchmarks/gpu.py host_path --backend torch   # a step's way through the host: down, sum, up
    python benchmarks/gpu.py nccl --backend torch        # start and a sum of the torch carrier with one rank
    python benchmarks/gpu.py memory --backend jax        # what caller and worker hold while the worker trains

``--device cpu`` tries the scripts without a GPU: its figures say that they run, and nothing of GPUs. ``--quick`` is a
smoke run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = ("jax", "torch", "tensorflow")
ROOT = Path(__file__).parents[1]
MILLION = 1_000_000
CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def tests(options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of GPUs and the suite of the backend, and count what passed, failed and was skipped."""
    suite = "tests/backend/test_replica.py" if options.quick else "tests/backend"
    result = {}
    for target in ("tests/parallel/test_gpus.py", suite):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", target]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() or [done.stderr[-500:]]
        counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])}
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
        result[target] = {"code": done.returncode, **counts, "seconds": seconds(begin), "lines": failed[:50]}
    return result


def one_worker(options: argparse.Namespace) -> dict[str, Any]:
    """Time epochs of ``model.fit`` and of a Trainer with one worker, in turns; the first epoch of each is left out."""
    import keras
    from workloads import Workload

    import choros

    result: dict[str, Any] = {}
    for model, batch, steps in (("mlp", 128, 20 if options.quick else 500), ("cnn", 128, 2 if options.quick else 100)):
        load = Workload(model, batch, steps)
        x, y = load.data()
        times: dict[str, list[float]] = {"fit": [], "trainer": []}
        for _ in range(1 if options.quick else 3):
            for name, into in times.items():
                ends: list[float] = []
                watch = keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs, ends=ends: ends.append(time.perf_counter())
                )
                made = load.make()
                how = {"batch_size": batch, "epochs": 3 if options.quick else 6, "verbose": 0, "callbacks": [watch]}
                if name == "fit":
                    made.fit(x, y, **how)
                else:
                    choros.Trainer(made, workers=1, devices=options.device).fit(x, y, **how)
                into += [(later - sooner) / steps for sooner, later in itertools.pairwise(ends)]
        step = {name: round(1e3 * statistics.median(some), 3) for name, some in times.items()}
        result[model] = {"batch": batch, "step_ms": step, "trainer_of_fit": round(step["trainer"] / step["fit"], 3)}
    return result


def host_path(options: argparse.Namespace) -> dict[str, Any]:
    """Time what a step of AllReduce does to a gradient beside the sum's own waiting: down, sum of two, up."""
    import numpy as np

    down, up = transfers(options.backend, options.device)
    result = {}
    for count in (MILLION,) if options.quick else (MILLION, 25 * MILLION, 100 * MILLION):
        host, other, total = (np.ones(count, "float32") for _ in range(3))
        times: dict[str, list[float]] = {"down": [], "sum": [], "up": []}
        for number in range(7):
            fresh = up(host + number)  # JAX keeps what it has brought down once
            marks = [time.perf_counter()]
            for call, value in ((down, (fresh,)), (np.add, (host, other, total)), (up, (host,))):
                call(*value)
                marks.append(time.perf_counter())
            for into, (sooner, later) in zip(times.values(), itertools.pairwise(marks), strict=True):
                into.append(later - sooner)
        middle = {name: round(1e3 * statistics.median(some[2:]), 3) for name, some in times.items()}
        result[str(count)] = {"ms": middle, "step_ms": round(sum(middle.values()), 3)}
    return result


def transfers(backend: str, device: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return what brings a vector of a device to the host, and a vector of the host to the device; both wait."""
    import numpy as np

    if backend == "jax":
        import jax

        return np.asarray, lambda x: jax.device_put(x).block_until_ready()
    if backend == "torch":
        import torch

        def up(x: Any) -> Any:
            tensor = torch.from_numpy(x).to("cuda" if device == "gpu" else "cpu", copy=True)
            if device == "gpu":
                torch.cuda.synchronize()
            return tensor

        return lambda tensor: tensor.cpu().numpy(), up
    import tensorflow as tf

    def put(x: Any) -> Any:
        with tf.device("/GPU:0" if device == "gpu" else "/CPU:0"):
            tensor = tf.identity(tf.constant(x))
        tensor[-1].numpy()  # which waits
        return tensor

    return lambda tensor: tensor.numpy(), put


def nccl(options: argparse.Namespace) -> dict[str, Any]:
    """Time the start and a sum of PyTorch's carrier with one rank: NCCL on a GPU, gloo on the CPU."""
    import numpy as np

    from choros.comm.offload import torch as carrier
    from choros.comm.tcp.auth_socket import listening_socket

    on_gpu = options.device == "gpu"
    begin = time.perf_counter()
    device = carrier.device()
    result = seconds(begin)
    port, hears = listening_socket("127.0.0.1")
    begin = time.perf_counter()
    store = carrier.open_store("127.0.0.1", port, 1, hears, 60.0)
    made = carrier.TorchBackend(store, 0, 1, "127.0.0.1", on_gpu)
    started = seconds(begin)
    times = []
    for _ in range(2 if options.quick else 7):
        begin = time.perf_counter()
        look = made.sum(np.ones(MILLION, "float32"))
        while (total := look()) is None:
            time.sleep(0)
        times.append(seconds(begin))
        if total[-1] != 1.0:
            raise ArithmeticError(f"a sum over one rank is {total[-1]}")
    made.close()
    first, *others = times
    sums = {"first_sum_s": first, "sum_of_1M_s": statistics.median(others)}
    return {"carrier": made.name, "device": device, "device_s": result, "start_s": started, **sums}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Sample what the caller and the worker hold while the worker trains: of the GPU, and of this machine's memory."""
    from workloads import Workload

    import choros
    from choros.cluster.hardware import peak_memory

    load = Workload("cnn", 128, 4 if options.quick else 100)
    model, (x, y) = load.make(), load.data()
    most: dict[int, int] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            for pid, bytes_held in gpu_memory().items():
                most[pid] = max(bytes_held, most.get(pid, 0))

    thread = threading.Thread(target=sample)
    with choros.WorkerPool(1, devices=options.device) as pool:
        if options.device == "gpu":
            thread.start()
        choros.Trainer(model, workers=1, pool=pool).fit(x, y, batch_size=128, epochs=3, verbose=0)
        worker = pool.start().pids[0]
        host = {"caller": peak_memory(), "worker": peak_memory(worker)}
    done.set()
    gpu = {"caller": most.get(os.getpid()), "worker": most.get(worker)} if options.device == "gpu" else None
    variables = {name: os.environ.get(name) for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH")}
    return {"model_bytes": 4 * model.count_params(), "gpu_bytes": gpu, "peak_host_bytes": host, "variables": variables}


def gpu_memory() -> dict[int, int]:
    """Return the bytes that each process holds of the GPUs, as the driver says."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    pairs = [line.split(",") for line in text.splitlines() if line.strip()]
    return {int(pid): int(used) << 20 for pid, used in pairs if used.strip().isdecimal()}


def seconds(begin: float) -> float:
    return round(time.perf_counter() - begin, 6)


MEASURES = {"tests": tests, "one_worker": one_worker, "host_path": host_path, "nccl": nccl, "memory": memory}


def everything(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each measure on each backend, in a process of its own; what fails is kept with its last lines."""
    results = []
    for measure in MEASURES:
        for backend in ("torch",) if measure == "nccl" else BACKENDS:
            command = [sys.executable, __file__, measure, "--backend", backend, "--device", options.device]
            command += ["--quick"] if options.quick else []
            with tempfile.TemporaryFile("w+") as errors:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
                errors.seek(0)
                last = errors.read()[-1500:]
            made = json.loads(done.stdout) if done.returncode == 0 else None
            results.append(made or {"measure": measure, "backend": backend, "code": done.returncode, "failed": last})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=[*MEASURES, "all"])
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND") or "jax")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its figures mean nothing")
    parser.add_argument("--output", metavar="FILE", help="keep the JSON there too")
    options = parser.parse_args()
    os.environ.update({"KERAS_BACKEND": options.backend, **(CPU if options.device == "cpu" else {})})
    if options.measure == "all":
        result: Any = everything(options)
    else:
        from choros.cluster.hardware import version

        facts = {"measure": options.measure, "backend": options.backend, "version": version(options.backend)}
        facts |= {"device": options.device, "quick": options.quick, "cores": os.cpu_count()}
        facts |= {"load": round(os.getloadavg()[0], 2), "python": platform.python_version()}
        result = facts | {"result": MEASURES[options.measure](options)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
