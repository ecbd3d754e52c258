"""Plain ``model.fit`` on all cores against Choros with one worker per core: speed, and time with start-up.

Plain ``fit`` is one process without Choros, not bound, with the threads that Keras and the backend take by default.
Choros is a caller and one worker per core, with its own defaults. Both train the same rows in the same global batches
by the same optimizer. In each round all processes are new. First plain ``fit`` and each algorithm start, one after
the other: the time from before the model is built to the end of the first epoch is measured. Then they take turns on
all cores, 0.4 s each, while the others are stopped (``common.taking_turns``). Then Choros ends its workers, which is
measured too. The result has medians over the rounds.

``ratio``: rows per second of Choros in the steady state, divided by those of plain ``fit``. ``ratio_with_startup``:
the same for a training that takes plain ``fit`` 60 s, from before the model is built until all workers have
ended: (plain start-up + 60) / (start-up + 60 / ratio). Imports in the caller are not counted, those in the workers
are.

    python benchmarks/against_fit.py --backend jax --model CNN,MLP --algorithm allreduce,aeasgd    # prints JSON
    python benchmarks/against_fit.py --all       # all backends: reports/against_fit.json, reports/against_fit.md
    python benchmarks/against_fit.py --readme    # copies its table to README.md; draws README's picture (matplotlib)
"""

import importlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

from common import (
    BACKENDS,
    Control,
    TooShortError,
    arguments,
    compared,
    cores,
    hide_other_backends,
    long_enough,
    send,
    taking_turns,
)
from table import REPORTS, run
from workloads import Workload

LOADS = {  # rows of a worker's batch, batches of an epoch
    "CNN": (32, 8),
    "MLP": (128, 200),
    "LSTM": (64, 8),
}
MODELS = {
    "CNN": "Keras' network for CIFAR-10 (1,250,858 weights)",
    "MLP": "30-600-600-2 (380,402 weights)",
    "LSTM": "128 units, 64 steps of 16 features (75,530 weights)",
}
ALGORITHMS = {"allreduce": "AllReduce", "aeasgd": "AEASGD"}
RUN = 60.0  # seconds of plain fit, in the ratio with start-up
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- begin: against_fit -->\n", "<!-- end: against_fit -->\n"
TITLES = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}


def say(word: str, value: Any) -> None:
    print(word, json.dumps(value), flush=True)


def train(workload: dict[str, Any], algorithm: str, workers: int) -> None:
    """Train until a line of input; print the first epoch's time, the ends of the others, and how long the end took."""
    hide_other_backends()
    import keras

    import choros

    load, ends, stop = Workload(**workload), [], threading.Event()
    x, y = load.data(workers)

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())
            if epoch == 0:
                say("first", [ends[0] - begin, os.getpid(), *pool.start().pids])
                threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
            self.model.stop_training = stop.is_set()

    begin = time.perf_counter()
    pool = choros.WorkerPool(workers, echo=False)
    trainer = choros.Trainer(load.make(), algorithm, workers=workers, pool=pool)
    trainer.fit(x, y, batch_size=load.batch * workers, epochs=100_000, verbose=0, callbacks=[Watch()])
    pool.close()
    say("closing", time.perf_counter() - ends[-1])
    say("ends", ends[1:])


class Choros:
    """A caller of Choros and its workers, which are stopped after their first epoch.

    Args:
        load: the workload of a worker.
        algorithm: name.
        workers: their number.

    Attributes:
        first: seconds from before the model was built to the end of the first epoch.
        pids: of all processes.
    """

    def __init__(self, load: Workload, algorithm: str, workers: int) -> None:
        task = json.dumps({"workload": load.json(), "algorithm": algorithm, "workers": workers})
        command = [sys.executable, __file__, "--child", task]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        word, _, values = self.process.stdout.readline().partition(" ")
        if word != "first":
            raise SystemExit(f"{algorithm} failed")
        self.first, *self.pids = json.loads(values)
        send(self.pids, signal.SIGSTOP)

    def end(self) -> tuple[list[float], float]:
        """Let it end; the times at which its later epochs ended, and the seconds from the last one to its end."""
        send(self.pids, signal.SIGCONT)
        lines = dict(line.split(" ", 1) for line in self.process.communicate("\n")[0].splitlines())
        self.pids = []
        return json.loads(lines["ends"]), json.loads(lines["closing"])

    def kill(self) -> None:
        """End all processes at once."""
        send(self.pids, signal.SIGKILL)


def one_round(load: Workload, algorithms: list[str], workers: int, seconds: float) -> dict[str, dict[str, float]]:
    """Start all sides, let them take turns, and return the figures of each algorithm beside those of plain fit."""
    rows = load.batch * workers
    plain = Control(Workload(load.model, rows, load.steps, load.optimizer), [-1])
    sides: dict[str, Choros] = {}
    try:
        for name in algorithms:
            sides[name] = Choros(load, name, workers)
        plain.start()
        with taking_turns([process.pid for process in plain.processes], *(side.pids for side in sides.values())):
            time.sleep(seconds * (1 + len(sides)))
        for side in sides.values():
            send(side.pids, signal.SIGSTOP)
        times = plain.end()
        results = {}
        for name, side in sides.items():
            ends, closing = side.end()
            figures = compared(ends, times, load.steps, sides=1 + len(sides))
            step, plain_step = figures["step_ms"] / 1e3, figures["control_step_ms"] / 1e3
            results[name] = {
                "ratio": figures["ratio"],
                "rows_per_s": rows / step,
                "plain_rows_per_s": rows / plain_step,
                "startup_s": max(0.0, side.first - load.steps * step) + closing,
                "plain_startup_s": max(0.0, plain.first[0] - load.steps * plain_step),
            }
        return results
    finally:
        for process in plain.processes:
            process.kill()
        for side in sides.values():
            side.kill()


def long_enough_round(
    load: Workload, algorithms: list[str], workers: int, seconds: float
) -> dict[str, dict[str, float]] | None:
    """Return the figures of a round, which is repeated with longer turns if a side ended too few epochs; or None."""
    try:
        return long_enough(lambda span: one_round(load, algorithms, workers, span), seconds)
    except TooShortError as error:
        print(error, file=sys.stderr, flush=True)
        return None


def measure(options: Any) -> list[dict[str, Any]]:
    """Return a result for each model and algorithm of a backend: medians over the rounds."""
    workers, rounds = len(cores()), options.rounds or (1 if options.quick else 2)
    results = []
    for model in options.model:
        batch, steps = LOADS[model]
        load = Workload(model.lower(), batch, 2 if options.quick else steps, options.optimizer)
        seconds = 2.0 if options.quick else options.seconds
        tried = (long_enough_round(load, options.algorithm, workers, seconds) for _ in range(rounds))
        runs = [result for result in tried if result]
        if not runs:
            print(f"{model} {options.backend}: not measured", file=sys.stderr, flush=True)
            continue
        for name in options.algorithm:
            middle = {key: statistics.median(result[name][key] for result in runs) for key in runs[0][name]}
            complete = (middle["plain_startup_s"] + RUN) / (middle["startup_s"] + RUN / middle["ratio"])
            numbers = {"ratio_with_startup": complete, **middle}
            head = {"model": model, "backend": options.backend, "algorithm": name}
            ratios = [round(result[name]["ratio"], 3) for result in runs]
            results.append({**head, **{key: round(value, 3) for key, value in numbers.items()}, "ratios": ratios})
            print(model, options.backend, name, f"{middle['ratio']:.2f}", file=sys.stderr, flush=True)
    return results


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    import keras

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(cores()),
        "python": platform.python_version(),
        "keras": keras.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _superlinear(values: dict[str, Any]) -> str:
    """Return the reason for ratios above the number of cores, with the figures of the largest one; "" without them."""
    cores = values["machine"]["cores"]
    best = max(values["results"], key=lambda result: result["ratio"])
    if best["ratio"] <= cores:
        return ""
    return (
        f"A ratio above {cores} means that plain `fit` loses time to its threads, and to new memory in each step: on "
        f"{TITLES[best['backend']]} it trains {best['plain_rows_per_s']:,.0f} rows of the {best['model']} a second, "
        f"and one worker on one core {best['rows_per_s'] / cores:,.0f}. "
    )


def _spread(values: dict[str, Any]) -> str:
    """Return how far the rounds of a ratio are apart, as a sentence; "" if there is one round."""
    spreads = [max(result["ratios"]) / min(result["ratios"]) - 1 for result in values["results"]]
    if not any(spreads):
        return ""
    return f" The rounds of a ratio differ by {statistics.median(spreads):.0%} (median), at most by {max(spreads):.0%}."


def _notes(values: dict[str, Any]) -> str:
    """Return what the table's figures mean, its models with their global batches, and the machine."""
    facts, optimizer = values["machine"], values.get("optimizer", "momentum")
    optimizer = "SGD with momentum" if optimizer == "momentum" else optimizer
    models = (
        f"{name}: {MODELS[name]}, global batch {LOADS[name][0] * facts['cores']}."
        for name in dict.fromkeys(result["model"] for result in values["results"])
    )
    rounds = min(len(result["ratios"]) for result in values["results"])
    return (
        f"In brackets: with start-up, for a training that takes plain `fit` {RUN:.0f} s. {_superlinear(values)}"
        f"{' '.join(models)} Optimizer: {optimizer}. Measured in "
        f"{'one round' if rounds == 1 else f'{rounds} rounds'} on {facts['date']}, {facts['cores']} cores "
        f"({facts['processor'].replace('(R)', '')}), no GPU.{_spread(values)}"
    )


def table(values: dict[str, Any]) -> str:
    """Return the table in Markdown, with notes about the figures, the models and the machine."""
    results = {(result["model"], result["algorithm"], result["backend"]): result for result in values["results"]}
    backends = [name for name in BACKENDS if any(name == key[2] for key in results)]
    lines = [
        "| model, algorithm | " + " | ".join(TITLES[name] for name in backends) + " |",
        "|---|" + "---|" * len(backends),
    ]
    for model, name in dict.fromkeys((result["model"], result["algorithm"]) for result in values["results"]):
        cells = []
        for backend in backends:
            result = results.get((model, name, backend))
            cells.append(f"{result['ratio']:.2f} ({result['ratio_with_startup']:.2f})" if result else "")
        lines.append(f"| {model}, {ALGORITHMS[name]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        textwrap.fill(_notes(values), 120, break_long_words=False, break_on_hyphens=False),
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    """Return a page whose table, between the two comments, is replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no {(BEGIN if not begin else END).strip()}")
    return f"{before}{begin}{text}{end}{after}"


def names_of(known: Any) -> Any:
    """Return the type of an option of comma-separated names."""
    by_lower = {name.lower(): name for name in known}

    def read(text: str) -> list[str]:
        return [by_lower[name.lower()] for name in text.split(",")]

    read.__name__ = f"list of {', '.join(known)}"  # for the message about a wrong value
    return read


def main() -> None:
    options = arguments(
        re.sub("``", "", __doc__),
        threads=None,
        model={"type": names_of(LOADS), "default": list(LOADS), "help": "comma-separated: CNN, MLP, LSTM"},
        algorithm={"type": names_of(ALGORITHMS), "default": list(ALGORITHMS), "help": "comma-separated"},
        seconds={"type": float, "default": 4.0, "help": "of each side in a round"},
        all={"action": "store_true", "help": "all backends, each in a process; writes the report"},
        readme={
            "action": "store_true",
            "help": "copy the table to README.md, draw its picture; measure nothing",
        },
        child={"help": "for its own processes"},
    )
    path = REPORTS / "against_fit.json"
    if options.child:
        train(**json.loads(options.child))
    elif options.readme:
        README.write_text(with_table(README.read_text(), table(json.loads(path.read_text()))))
        subprocess.run([sys.executable, README.parent / "docs/figures/hero.py"], check=True)
    elif options.all:
        same = ["--rounds", str(options.rounds), "--seconds", str(options.seconds), "--optimizer", options.optimizer]
        same += ["--model", ",".join(options.model), "--algorithm", ",".join(options.algorithm)]
        parts = [run("against_fit", "--backend", name, *same, *["--quick"] * options.quick) for name in BACKENDS]
        results = [item for part in parts for item in part["results"]]
        report = {"run_s": RUN, "optimizer": options.optimizer, "results": results, "machine": machine()}
        report["machine"]["backends"] = {part["backend"]: part["version"] for part in parts}
        if not options.quick:
            path.write_text(json.dumps(report, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(report))
        print(json.dumps(report))
        print(table(report), file=sys.stderr)
    else:
        result = {"run_s": RUN, "results": measure(options), "machine": machine()}
        version = importlib.import_module(options.backend).__version__
        head = {"benchmark": "against_fit", "backend": options.backend, "version": version, "quick": options.quick}
        print(json.dumps({**head, **result}, indent=1))


if __name__ == "__main__":
    main()
