"""What the benchmarks share: control processes, interleaved rounds, one core and one thread for each, JSON.

"Control" is plain Keras: independent processes that run ``model.fit`` at the same time, one core and one thread each.
Every round measures control and Choros one after the other, in an order that alternates, and a ratio is the median
over the rounds. Neither side's compiling counts: the control's processes live through all rounds and their first
epoch is left out, Choros' figures are those of ``history.run``, which leaves out start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BACKENDS = ("jax", "torch", "tensorflow")


def arguments(doc: str, **more: Any) -> argparse.Namespace:
    """Read the options that every training benchmark has, and settle this process' backend."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its figures mean nothing")
    parser.add_argument("--rounds", type=int, default=0, help="0: as the benchmark likes")
    parser.add_argument("--optimizer", default="momentum", help="a Keras optimizer; 'momentum' is SGD with momentum")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args()
    os.environ.update(surroundings(options.backend))
    return options


def surroundings(backend: str) -> dict[str, str]:
    """The environment of both sides: one thread, the CPU, this backend."""
    from choros.machine import variables

    return {
        **variables(1),
        "KERAS_BACKEND": backend,
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


class Control:
    """Plain Keras in processes of its own, each bound to one core.

    Args:
        workload: what they train, each for itself.
        cores: one process for each.
    """

    def __init__(self, workload: Any, cores: Sequence[int]) -> None:
        command = [sys.executable, str(HERE / "control.py")]
        self.processes = [
            subprocess.Popen(
                [*command, str(core), json.dumps(workload.json())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for core in cores
        ]
        for process in self.processes:
            self._read(process)

    def fit(self, epochs: int) -> float:
        """Train in all at the same time; the rows a second of all together, without the first epoch."""
        for process in self.processes:
            process.stdin.write(f"{epochs + 1}\n")
            process.stdin.flush()
        return sum(float(self._read(process)) for process in self.processes)

    def _read(self, process: Any) -> str:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a control process failed")
        return line.strip()

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(30)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def interleave(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call every side once a round, in an order that alternates; what each returned."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            found[name].append(sides[name]())
    return found


def compare(workload: Any, algorithms: dict[str, Any], workers: int, rounds: int, epochs: int) -> dict[str, Any]:
    """Measure algorithms against control, everything on ``workers`` cores, one each."""
    import choros

    mine = cores()[:workers]
    if len(mine) < workers:
        raise SystemExit(f"{workers} cores are needed; this process may use {len(mine)}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(mine))  # the workers get these, one each
    x, y = workload.data(workers)
    with choros.WorkerPool(workers, threads=1) as pool, Control(workload, mine) as control:

        def side(algorithm: Any) -> Callable[[], Any]:
            trainer = choros.Trainer(workload.make(), algorithm, workers=workers, pool=pool)
            return lambda: trainer.fit(x, y, batch_size=workload.batch * workers, epochs=epochs, verbose=0).run

        sides: dict[str, Callable[[], Any]] = {"control": lambda: control.fit(epochs)}
        sides |= {name: side(algorithm) for name, algorithm in algorithms.items()}
        found = interleave(sides, rounds)
    plain = found.pop("control")
    return {
        "workload": workload.json(),
        "workers": workers,
        "rounds": rounds,
        "control_samples_per_second": round(statistics.median(plain)),
        "control_step_ms": round(1e3 * workers * workload.batch / statistics.median(plain), 3),
        "algorithms": {name: summary(runs, plain, workload, workers) for name, runs in found.items()},
    }


def summary(runs: list[Any], plain: list[float], workload: Any, workers: int) -> dict[str, Any]:
    """Ratio, spread and step time of one algorithm's runs."""
    speeds = [run.samples_per_second for run in runs]
    ratios = [speed / base for speed, base in zip(speeds, plain, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "samples_per_second": round(statistics.median(speeds)),
        "step_ms": round(1e3 * workers * workload.batch / statistics.median(speeds), 3),
        "exchanging": round(statistics.median(run.exchanging for run in runs), 3),
        "staleness": round(statistics.median(run.staleness for run in runs), 2),
    }


def emit(name: str, options: argparse.Namespace, target: float, result: dict[str, Any]) -> None:
    """Print the result as JSON: a ratio for each algorithm, and whether it reaches its target."""
    for figures in result["algorithms"].values():
        figures["reached"] = figures["ratio"] >= target
    where = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": name, "backend": options.backend, "quick": options.quick, "target": target}
    print(json.dumps({**head, **where, **result}, indent=1))
