"""Common parts of the benchmarks: control processes, turns, one core and one thread for each, JSON.

"Control" is plain Keras: independent processes that run ``model.fit`` at the same time, one core and one thread each.
Control and Choros take turns on the same cores, ``TURN`` seconds each, while the other side is stopped: whatever else
the machine does meets both alike, and neither disturbs the other's cache within its turn. A ratio is that of the rows
that both trained in the same minutes. ``--as-run`` makes turns of 10 seconds, so that stopping and continuing costs
nothing, as where a user runs one side alone; then the rounds differ more. Neither side's compiling counts: control has
compiled before it is asked to train, and Choros is counted from the end of its first epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from choros.cluster.hardware import variables

HERE = Path(__file__).parent
BACKENDS = ("jax", "torch", "tensorflow")


def arguments(doc: str, threads: int | None = 1, **more: Any) -> argparse.Namespace:
    """Read the options that every training benchmark has, and set this process' backend and threads.

    Args:
        doc: the benchmark's docstring.
        threads: of each process. None: as the backend decides, whatever the environment says.
        more: further options, by name.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its figures mean nothing")
    parser.add_argument("--rounds", type=int, default=0, help="0: as the benchmark likes")
    parser.add_argument("--as-run", action="store_true", help="turns of 10 seconds instead of 0.4")
    parser.add_argument("--optimizer", default="momentum", help="a Keras optimizer; 'momentum' is SGD with momentum")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args()
    # Users' processes load bytecode, which pip makes when it installs a package. Those of this tree make it once here.
    sys.dont_write_bytecode = False
    for name in (*variables(1), "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    os.environ.update(surroundings(options.backend, threads))
    return options


def surroundings(backend: str, threads: int | None = 1) -> dict[str, str]:
    """The environment of both sides: the threads, the CPU, this backend."""
    return {
        **(variables(threads) if threads else {}),
        "KERAS_BACKEND": backend,
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def hide_other_backends() -> None:
    """Let Keras find no TensorFlow unless it is the backend, as where one backend is installed: it would import it."""
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]


TURN, LONG_TURN = 0.4, 10.0  # seconds; the second with --as-run


class Turn(NamedTuple):
    """The number of the side that ran, and when its turn began and ended."""

    side: int
    begin: float
    end: float


class Control:
    """Plain Keras in processes of its own, each bound to one core.

    Args:
        workload: what they train, each for itself.
        cores: one process for each. A process for -1 is not bound.

    Attributes:
        first: for each process, seconds from before the model was built to the end of the first epoch.
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
        self.first = []
        for process in self.processes:
            word, _, seconds = process.stdout.readline().partition(" ")
            if word != "ready":
                raise SystemExit("a control process failed")
            self.first.append(float(seconds))

    def start(self) -> None:
        """Train in all."""
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    def end(self) -> list[list[float]]:
        """End them; the times at which each ended its epochs."""
        for process in self.processes:
            process.kill()
        return [[float(line) for line in process.communicate()[0].splitlines()] for process in self.processes]


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes."""
    for pid in pids:
        os.kill(pid, number)


@contextmanager
def taking_turns(*sides: Sequence[int], turn: float = TURN) -> Iterator[list[Turn]]:
    """Let one of several sets of processes run at a time, for ``turn`` seconds each; yield the turns as they end."""
    done, turns = threading.Event(), list[Turn]()

    def alternate() -> None:
        for side in sides:
            send(side, signal.SIGSTOP)
        for number, side in itertools.cycle(enumerate(sides)):
            send(side, signal.SIGCONT)
            begin = time.perf_counter()
            stop = done.wait(turn)
            turns.append(Turn(number, begin, time.perf_counter()))
            send(side, signal.SIGSTOP)
            if stop:
                break
        for side in sides:
            send(side, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield turns
    finally:
        done.set()
        thread.join()


def within_turns(turns: Sequence[Turn], side: int, ends: Sequence[float]) -> float:
    """Return the seconds of an epoch within the turns of a side, from the times at which its epochs ended."""
    inside = [[end for end in ends if turn.begin < end <= turn.end] for turn in turns if turn.side == side]
    epochs = sum(len(times) - 1 for times in inside if times)
    if not epochs:
        raise TooShortError("too short: no turn has two ends of epochs; is the machine busy?")
    return sum(times[-1] - times[0] for times in inside if times) / epochs


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def compare(
    workload: Any,
    algorithms: dict[str, Any],
    workers: int,
    rounds: int,
    seconds: float,
    as_run: bool = False,
    plain: Any = None,
) -> dict[str, Any]:
    """Measure algorithms against control, everything on ``workers`` cores, one each.

    ``plain`` is the control's workload if it is another one.

    With ``as_run`` each round has two long turns of each side, or more if ``seconds`` is longer.
    """
    turn = LONG_TURN if as_run else TURN
    seconds = max(seconds, 4 * turn) if as_run else seconds
    import choros

    worker_cores, others = cores()[:workers], cores()[workers:]
    if len(worker_cores) < workers:
        raise SystemExit(f"{workers} cores are needed; this process may use {len(worker_cores)}")
    complete = os.sched_getaffinity(0)
    os.sched_setaffinity(0, worker_cores)  # the workers bind themselves to what they find
    results: dict[str, list[dict[str, float]]] = {name: [] for name in algorithms}
    with choros.WorkerPool(workers, threads=1) as pool:
        pool.start()
        os.sched_setaffinity(0, others or worker_cores)  # the caller stays out of the way where it can
        for _ in range(rounds):
            for name, algorithm in algorithms.items():
                side = partial(beside, workload, algorithm, worker_cores, pool, turn=turn, plain=plain)
                results[name].append(long_enough(side, seconds))
    os.sched_setaffinity(0, complete)
    result = {name: {key: median(runs, key) for key in runs[0]} for name, runs in results.items()}
    for name, runs in results.items():
        result[name]["ratios"] = [round(run["ratio"], 3) for run in runs]
    times = {"rounds": rounds, "seconds": seconds, "turn": turn}
    return {"workload": workload.json(), "workers": workers, **times, "algorithms": result}


def beside(
    workload: Any, algorithm: Any, worker_cores: list[int], pool: Any, seconds: float, turn: float, plain: Any = None
) -> dict[str, float]:
    """Train by an algorithm while control trains on the same cores, in turns."""
    import keras

    import choros

    ends: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())
            self.model.stop_training = ends[-1] - ends[0] > seconds

    workers = len(worker_cores)
    x, y = workload.data(workers)
    control = Control(plain or workload, worker_cores)
    settings = algorithm if isinstance(algorithm, dict) else {"algorithm": algorithm}
    trainer = choros.Trainer(workload.make(), workers=workers, pool=pool, **settings)
    control.start()
    with taking_turns(pool.start().pids, [process.pid for process in control.processes], turn=turn) as turns:
        batch = workload.batch * workers
        record = trainer.fit(x, y, batch_size=batch, epochs=100_000, verbose=0, callbacks=[Watch()]).run
    return {**ratio(ends, control.end(), workload.steps, turns), "staleness": record.staleness}


def ratio(
    ends: Sequence[float], control: Sequence[Sequence[float]], steps: int, turns: Sequence[Turn]
) -> dict[str, float]:
    """Return the figures of ``compared``; of long turns, those of epochs that began and ended within a turn.

    Few long turns do not divide the time equally between the first and the last epoch of both sides.
    """
    if turns[0].end - turns[0].begin < LONG_TURN / 2:
        return compared(ends, control, steps)
    worker_ms = 1000 * within_turns(turns, 0, ends) / steps
    plain = statistics.fmean(1000 * within_turns(turns, 1, times) / steps for times in control)
    return {"ratio": plain / worker_ms, "step_ms": worker_ms, "control_step_ms": plain}


class TooShortError(SystemExit):
    """A side has ended too few epochs to be measured."""


ResultT = TypeVar("ResultT")


def long_enough(measure: Callable[[float], ResultT], seconds: float) -> ResultT:
    """Return what ``measure(seconds)`` returns; if a side ended too few epochs, of 3 and then 9 times the seconds.

    Raises:
        TooShortError: that was too short too.
    """
    for longer in (1, 3):
        try:
            return measure(longer * seconds)
        except TooShortError as error:
            print(error, file=sys.stderr, flush=True)
    return measure(9 * seconds)


def compared(ends: Sequence[float], control: Sequence[Sequence[float]], steps: int, sides: int = 2) -> dict[str, float]:
    """Return the figures of the turns, between every side's first epoch and the first end.

    Args:
        ends: when our epochs ended, in which every worker made ``steps`` steps.
        control: for each control process, when its own ended.
        steps: of an epoch.
        sides: how many took turns.
    """
    import numpy as np

    everyone = [ends, *control]
    if min(map(len, everyone)) < 2 or (begin := max(t[0] for t in everyone)) >= (end := min(t[-1] for t in everyone)):
        counts = ", ".join(str(len(times)) for times in everyone)
        raise TooShortError(
            f"too short: the sides have ended {counts} epochs, not two each at once; is the machine busy?"
        )
    epochs, *plain = (np.diff(np.interp([begin, end], times, np.arange(len(times))))[0] for times in everyone)
    worker_ms, workers = (
        1000 * (end - begin) / (sides * steps),
        len(control),
    )  # ms of one side's turns, a step of each epoch
    return {
        "ratio": epochs * workers / sum(plain),
        "step_ms": worker_ms / epochs,
        "control_step_ms": worker_ms * workers / sum(plain),
    }


def measure(
    name: str,
    options: argparse.Namespace,
    target: float,
    workload: Any,
    algorithms: dict[str, Any],
    workers: int,
    seconds: float,
    rounds: int = 3,
) -> None:
    """Measure algorithms against control, and print the result; ``--quick`` makes one round of a second."""
    rounds, seconds = options.rounds or (1 if options.quick else rounds), 1.0 if options.quick else seconds
    emit(name, options, target, compare(workload, algorithms, workers, rounds, seconds, options.as_run))


def pin(rank: int) -> None:
    """Bind this process to one core, another one for each rank."""
    result = cores()
    os.sched_setaffinity(0, {result[rank % len(result)]})


def ranks(message: Sequence[Sequence[object]], fds: Sequence[int]) -> dict[str, Any]:
    """Run this script once for each list of words, with one thread each; return the JSON that the first one prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, sys.argv[0], *map(str, of_rank)],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for of_rank in message
    ]
    outputs = [child.communicate(timeout=600)[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a rank failed")
    result: dict[str, Any] = json.loads(outputs[0])
    return result


def of_child(kind: str) -> list[str]:
    """Run this script with ``--child KIND`` in addition to its options; return the words that it prints."""
    command = [sys.executable, *sys.argv, "--child", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.split()


def processor_seconds(pids: Sequence[int]) -> float:
    """Return the seconds of processors that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def median(runs: Sequence[dict[str, float]], key: str) -> float:
    return round(statistics.median(float(run[key]) for run in runs), 3)


def emit(name: str, options: argparse.Namespace, target: float | dict[str, float], result: dict[str, Any]) -> None:
    """Print the result as JSON: a ratio for each algorithm, and whether it reaches its target."""
    for algorithm, figures in result["algorithms"].items():
        figures["reached"] = figures["ratio"] >= (target[algorithm] if isinstance(target, dict) else target)
    where = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": name, "backend": options.backend, "quick": options.quick, "target": target}
    print(json.dumps({**head, **where, **result}, indent=1))
