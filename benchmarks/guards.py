"""Cost of the checks during training: processor time of heartbeats, time limits and comparisons, as a share of all.

    python benchmarks/guards.py --backend jax --seconds 20

Two ranks of a job train the MLP; functions that only watch are wrapped by clocks of their thread (what an empty
function costs so is taken off again), from the second epoch on. The process of ``choros run``, which only watches then,
is added whole. Checkpoints are another benchmark's (checkpoint.py). Prints JSON.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from checkpoint import processor
from common import arguments
from workloads import Workload

BAR = 0.01
RANKS = 2
# The calls that follow a computation, with cold caches.
FIRST = ("ControlBlock.beat", "NonFiniteDetector.gradient", "NonFiniteDetector.weights")


class Nothing:
    """A call at each step, to measure the cost of a clock there: much more than in a loop of its own."""

    @staticmethod
    def at_all() -> None:
        """Do nothing."""


class Clock:
    """Counts calls of functions, and the processor time of their threads; what is called inside counts once."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self.inside = False

    def around(self, where: Any, name: str) -> None:
        """Put the clock around a function of a class or a module."""
        plain: Callable[..., Any] = getattr(where, name)
        calls = self.spent.setdefault(f"{where.__name__.rpartition('.')[2]}.{name}", [0.0, 0.0])
        clock = time.thread_time

        def timed(*args: Any, **named: Any) -> Any:
            if self.inside:
                return plain(*args, **named)
            self.inside, begun = True, clock()
            try:
                return plain(*args, **named)
            finally:
                calls[0] += clock() - begun
                calls[1] += 1
                self.inside = False

        setattr(where, name, timed)

    def empty(self) -> float:
        """Seconds that one call of an empty function is counted for, in a row."""
        inner = Clock()
        plain = Nothing.at_all
        inner.around(Nothing, "at_all")
        for _ in range(20_000):
            Nothing.at_all()
        Nothing.at_all = plain  # type: ignore[method-assign]
        seconds, calls = inner.spent["Nothing.at_all"]
        return seconds / calls


def rank(name: str, load: Workload, seconds: float) -> None:
    """Train as one rank, and say what was counted."""
    import keras

    import choros
    from choros.comm.shm import group, group_header, rank_status, robust_lock
    from choros.consistency import nonfinite, replica_divergence
    from choros.param_server import shared_memory
    from choros.training.async_control import control_block
    from choros.training.worker import context

    clock, begun = Clock(), list[float]()
    watched = {
        control_block.ControlBlock: ("count_step", "step_counts"),
        nonfinite.NonFiniteDetector: ("gradient", "weights", "exchanged", "loss"),
        replica_divergence: ("mark", "compare"),
        group_header.GroupHeader: ("check_given_up", "post", "posted", "_check"),
        group: ("difference",),
        rank_status.RankStatus: ("say",),
        robust_lock.RobustLock: ("_check",),
        shared_memory.SharedMemoryParameterServer: ("_fit", "_commit"),
    }
    for where, names in watched.items():
        for each in names:
            clock.around(where, each)
    clock.around(Nothing, "at_all")
    plain, progress = context.WorkerContext.batches, context.WorkerContext.progress

    def after_a_step(self: Any, epoch: int, step: int) -> None:
        Nothing.at_all()
        progress(self, epoch, step)

    def batches(self: Any, epoch: int) -> Iterator[Any]:
        if epoch == 1:
            for message in clock.spent.values():
                message[:] = [0.0, 0.0]
            begun[:] = [processor([os.getpid()]), processor([os.getppid()])]
        return plain(self, epoch)

    context.WorkerContext.batches, context.WorkerContext.progress = batches, after_a_step  # type: ignore[method-assign]

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        first = 0.0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.first = self.first or time.monotonic()
            self.model.stop_training = epoch > 0 and time.monotonic() - self.first > seconds

    x, y = load.data(RANKS)
    trainer = choros.Trainer(load.make(), name)
    trainer.fit(x, y, batch_size=load.batch * RANKS, epochs=100_000, verbose=0, callbacks=[Watch()])
    rank_seconds, head = processor([os.getpid()]) - begun[0], processor([os.getppid()]) - begun[1]
    calls = {each: message for each, message in clock.spent.items() if message[1]}
    print(
        "COUNTED " + json.dumps({"own": rank_seconds, "head": head, "empty": clock.empty(), "calls": calls}), flush=True
    )


def measure(name: str, load: Workload, seconds: float) -> dict[str, object]:
    """Run a job, and add up what its ranks counted."""
    command = [sys.executable, "-m", "choros", "run", "-n", str(RANKS), "--threads", "1", __file__, "--seconds"]
    settings = [str(seconds), "--rank", name, "--load", json.dumps(load.json())]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)
    lines = [json.loads(line.partition("COUNTED ")[2]) for line in done.stdout.splitlines() if "COUNTED " in line]
    if len(lines) != RANKS:
        raise SystemExit(done.stdout + done.stderr)
    head = max(result["head"] for result in lines)
    complete = sum(result["own"] for result in lines) + head
    by_name: dict[str, list[float]] = {}
    for result in lines:
        seconds, count = result["calls"].pop("Nothing.at_all")
        for each, (spent, calls) in result["calls"].items():
            known = by_name.setdefault(each, [0.0, 0.0])
            known[0] += max(0.0, spent - calls * (seconds / count if each in FIRST else result["empty"]))
            known[1] += calls
    guards = head + sum(spent for spent, _ in by_name.values())
    shares = {each: [round(spent / complete, 6), int(calls)] for each, (spent, calls) in by_name.items()}
    return {
        "share": guards / complete,
        "head": head / complete,
        "processor_seconds": complete,
        "share_and_calls": shares,
    }


def main() -> None:
    """Measure, or be a rank."""
    options = arguments(
        __doc__ or "",
        seconds={"type": float, "default": 20.0},
        algorithms={"nargs": "+", "default": ["allreduce", "aeasgd"]},
        rank={"default": ""},
        load={"default": ""},
    )
    if options.rank:
        rank(options.rank, Workload(**json.loads(options.load)), options.seconds)
        return
    seconds = 2.0 if options.quick else options.seconds
    load = Workload("mlp", 128, 20 if options.quick else 200, options.optimizer)
    results = {name: measure(name, load, seconds) for name in options.algorithms}
    facts = {"benchmark": "guards", "backend": options.backend, "bar": BAR, "ranks": RANKS, "workload": load.json()}
    print(json.dumps(facts | {"host": platform.machine(), "cores": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
