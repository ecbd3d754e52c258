"""Drills that kill a worker at any moment of a run, from the start of its process to its end.

    python drills/anytime.py --backend jax --number 30 --seed 1

A run without a failure is measured once for each synchronous algorithm. Each drill starts its own processes. It draws
an algorithm, the number of restarts (0 or 2), and one kill, or up to two with restarts. A kill has a worker, a phase
and a moment of it. The phases are the start (processes start, libraries load, models are built), training, and the
end (last reports, last weights, closing). A drill whose run ends before its kills does not count.

With restarts, the result must be correct, as in ``run.py``. Without restarts, the result must be correct, or the error
must be a ``WorkerFailedError`` that names the worker and SIGKILL, with the given model unchanged; a synchronous run
may be correct only if the kill came at the end. No process, descriptor or shared memory may be left. Prints JSON. The
exit code is 1 if a drill failed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run import (
    ASYNCHRONOUS,
    EPOCHS,
    SYNCHRONOUS,
    WORKERS,
    children,
    choose_backend,
    data_of,
    left_behind,
    limited,
    model_of,
    parser_of,
    report,
    wrong,
)

PHASES = ("start", "training", "end")
LIMIT, TIMEOUT = 120.0, 30.0  # seconds a drill may take, seconds after which a worker counts as hung


@dataclass
class Kill:
    """One kill: of which worker, in which phase, after which share of its usual time."""

    worker: int
    phase: str
    share: float
    done: float | None = None  # when it was done


@dataclass
class Whole:
    """A run without a failure: its model, and the seconds of its phases."""

    model: Any
    seconds: dict[str, float]


@dataclass
class Phases:
    """The phases of a run as they begin."""

    begun: dict[str, float] = field(default_factory=dict)
    events: dict[str, threading.Event] = field(default_factory=lambda: {name: threading.Event() for name in PHASES})
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self, phase: str) -> None:
        """Note that a phase begins; a second time, in a run that was started again, changes nothing."""
        self.begun.setdefault(phase, time.monotonic())
        self.events[phase].set()

    def callback(self) -> Any:
        """A callback that notes when training begins and when its last epoch ends."""
        import keras

        return keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.begin("training"),
            on_epoch_end=lambda epoch, logs: self.begin("end") if epoch + 1 == EPOCHS else None,
        )


def process_of(worker: int, before: set[int]) -> int | None:
    """The process of a worker, or None while there is none; those of the run before may still be ending."""
    for pid in children() - before:
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]  # each argument ends with a zero
            if b"choros.launch.process.pool_worker" in argv and int(argv[-2]) == worker:
                return pid
    return None


def carry_out(kill: Kill, phases: Phases, uninterrupted: Whole, before: set[int]) -> None:
    """Wait for the moment, or for the next phase if that comes first; kill the worker as soon as it has a process."""
    while not phases.events[kill.phase].wait(0.05):
        if phases.over.is_set():
            return
    following = [phases.events[phase] for phase in PHASES[PHASES.index(kill.phase) + 1 :]]
    seconds = uninterrupted.seconds[kill.phase] / (1 if following else 2)  # workers end before the run does
    (following or [phases.over])[0].wait(kill.share * seconds)
    while not phases.over.is_set():
        pid = process_of(kill.worker, before)
        if pid is None:
            time.sleep(0.001)
            continue
        with contextlib.suppress(ProcessLookupError):
            held = os.pidfd_open(pid)
            try:
                if process_of(kill.worker, before) == pid:  # the number was not given to another process meanwhile
                    kill.done = time.monotonic()
                    signal.pidfd_send_signal(held, signal.SIGKILL)
                    return
            finally:
                os.close(held)


def fit(name: str, phases: Phases, restarts: int, each_batch: bool) -> tuple[Any, Any]:
    """One run with processes of its own; returns the model, and the history or the error."""
    import keras

    import choros

    model = model_of(name in SYNCHRONOUS)
    algorithm = getattr(choros, name)(**{**SYNCHRONOUS, **ASYNCHRONOUS}[name])
    settings = {"restarts": restarts, "timeout": TIMEOUT, "first_timeout": 60.0, "echo": False}
    callbacks = [phases.callback()]
    if each_batch:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None))
    phases.begin("start")
    trainer = choros.Trainer(model, algorithm, workers=WORKERS, **settings)
    try:
        return model, trainer.fit(
            data_of(name in SYNCHRONOUS, "", 0), epochs=EPOCHS, seed=3, verbose=0, callbacks=callbacks
        )
    except Exception as error:
        return model, error


def measure(name: str) -> Whole:
    """Make a run without a failure."""
    phases = Phases()
    model, history = fit(name, phases, 0, False)
    if isinstance(history, Exception):
        raise history
    times = [*(phases.begun[phase] for phase in PHASES), time.monotonic()]
    return Whole(model, {phase: times[at + 1] - times[at] for at, phase in enumerate(PHASES)})


def faults(error: Exception, model: Any, restarts: int, kills: list[Kill]) -> list[str]:
    """Return the faults of a run that ended with an error."""
    import numpy as np

    import choros

    if restarts or not isinstance(error, choros.WorkerFailedError):
        return [f"{type(error).__name__}: {error}".partition("\n")[0]]
    problems = []
    if (error.rank, error.signal) != (kills[0].worker, "SIGKILL") or "SIGKILL" not in str(error) or not error.host:
        problems.append(f"worker {kills[0].worker} was killed, but: {error}".partition("\n")[0])
    if kills[0].done is None:
        problems.append("nobody was killed")
    inputs = model_of(len(model.weights) > 1).get_weights()
    if not all(np.array_equal(value, other) for value, other in zip(model.get_weights(), inputs, strict=True)):
        problems.append("the given model has changed")
    return problems


def drill(number: int, seed: int, wholes: dict[str, Whole], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run one drill, and return what was drawn, the outcome and the faults."""
    rng = random.Random(f"any/{seed}/{number}")
    name = rng.choice(names or (*SYNCHRONOUS, *ASYNCHRONOUS))
    restarts, each_batch = rng.choice((0, 2)), rng.random() < 0.5
    kills = [
        Kill(rng.randrange(WORKERS), rng.choice(PHASES), rng.random()) for _ in range(rng.randint(1, restarts or 1))
    ]
    if name not in wholes:  # workers that train alone are compared with no other run: any tells how long the phases are
        known = next(iter(wholes.values()), None) if name in ASYNCHRONOUS else None
        wholes[name] = measure(name) if known is None else Whole(None, dict(known.seconds))
    phases, before, descriptors = Phases(), children(), len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=carry_out, args=(kill, phases, wholes[name], before)) for kill in kills]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    model, history = fit(name, phases, restarts, each_batch)
    ended = time.monotonic()
    phases.over.set()
    for thread in threads:
        thread.join()
    facts: dict[str, Any] = {"number": number, "algorithm": name, "restarts_allowed": restarts, "batches": each_batch}
    facts["kills"] = [
        {"worker": kill.worker, "phase": kill.phase, "at": kill.done and kill.done - begun} for kill in kills
    ]
    facts["began"] = {phase: at - begun for phase, at in phases.begun.items()}
    if isinstance(history, Exception):
        facts["outcome"], problems = type(history).__name__, faults(history, model, restarts, kills)
        facts["peak_memory"] = getattr(history, "peak_memory", None)
    else:
        ending = phases.begun["end"]
        wholes[name].seconds["end"] = min(wholes[name].seconds["end"], ended - ending)
        early = [kill for kill in kills if kill.done is not None and kill.done < ending]
        facts["outcome"], facts["restarts"] = "right", len(history.run.restarts)
        done = {kill.worker for kill in kills if kill.done is not None}
        problems = wrong(name, model, history, wholes[name].model, int(bool(early)), done)
        if len(history.run.restarts) > len(done and kills):
            problems.append(f"{len(history.run.restarts)} restarts after {len(kills)} kills")
    return {**facts, "seconds": ended - begun, "wrong": problems + left_behind(before, descriptors)}


def main() -> int:
    """Run the drills, and print the results."""
    options = parser_of(__doc__, 30, "how many drills that kill; some runs end first").parse_args()
    choose_backend(options.backend)
    os.environ["CHOROS_IDLE_SECONDS"] = "0"  # each drill starts its own workers
    done: list[dict[str, Any]] = []
    wholes: dict[str, Whole] = {}
    with_kills = 0
    for number in options.only or range(2 * options.number):
        done.append(limited(LIMIT, drill, number, options.seed, wholes))
        with_kills += any(kill["at"] is not None for kill in done[-1]["kills"])
        if with_kills == options.number and not options.only:
            break
    kills = [kill for result in done for kill in result["kills"] if kill["at"] is not None]
    of_phases = {phase: sum(kill["phase"] == phase for kill in kills) for phase in PHASES}
    outcomes = {
        name: sum(result["outcome"] == name for result in done) for name in {result["outcome"] for result in done}
    }
    return report(options, done, with_kills=with_kills, kills=of_phases, outcomes=outcomes)


if __name__ == "__main__":
    sys.exit(main())
