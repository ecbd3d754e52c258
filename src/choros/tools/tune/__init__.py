"""A search for the ranks, threads, binding and spin time with which a script trains fastest on this machine."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from choros.errors import counted
from choros.tools.tune.settings import SEEN, TUNE, TuneSettings

_POLL = 0.1  # seconds between two looks for the result of a trial
_PATIENCE = 30.0  # seconds that the ranks may take to end after SIGTERM
_LAST = 5  # lines of the output of a failed trial in the report
_ALIKE = 1.1  # a time is about as long as another one if it is at most so many times as long


@dataclass(frozen=True)
class Trial:
    """One way to start a script.

    Attributes:
        ranks: int. Number of ranks.
        threads: int. Threads of each rank.
        bind: bool. Whether each rank is bound to separate cores.
        blocktime: int. Milliseconds that a thread of OpenMP spins after a parallel region.
        plain: bool. Whether one process trains by ``model.fit`` of Keras, with the library's own spin time.

    Example:
        >>> Trial(2, 4, True, 0).command_line(["train.py", "--fast"])
        'KMP_BLOCKTIME=0 OMP_WAIT_POLICY=PASSIVE choros run -n 2 --threads 4 train.py --fast'
    """

    ranks: int
    threads: int
    bind: bool = True
    blocktime: int = 0
    plain: bool = False

    @property
    def environ(self) -> dict[str, str]:
        """The variables of the spin time: the first for Intel's OpenMP, the second for GNU's."""
        if self.plain:
            return {}
        policy = "ACTIVE" if self.blocktime else "PASSIVE"
        return {"KMP_BLOCKTIME": str(self.blocktime), "OMP_WAIT_POLICY": policy}

    @property
    def options(self) -> list[str]:
        """The options of ``choros run``."""
        return ["-n", str(self.ranks), "--threads", str(self.threads), *([] if self.bind else ["--no-bind"])]

    def command_line(self, target: Sequence[str]) -> str:
        """Return the line for a job script.

        Args:
            target: the script and its arguments.
        """
        variables = " ".join(f"{name}={value}" for name, value in self.environ.items())
        return f"{variables} choros run {shlex.join([*self.options, *target])}"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        trial: Trial.
        step: float. Median seconds of a step, or infinity if the trial failed.
        epoch: float or None. Seconds of an epoch's steps: the number of steps times their median. None if the script
            does not know the number.
        failure: str. The last lines of the output, if the trial failed.
        uncertainty: float. Seconds by which ``step`` may be wrong, because the steps' times vary: half of its 95 %
            interval.
        no_fit: bool. Whether the script ended without a fit. Other trials would do so too.
    """

    trial: Trial
    step: float = float("inf")
    epoch: float | None = None
    failure: str = ""
    uncertainty: float = 0.0
    no_fit: bool = False

    @property
    def cost(self) -> float:
        """The figure by which trials are compared: seconds of an epoch, or of a step if the epoch is unknown."""
        return self.step if self.epoch is None else self.epoch

    def may_be_as_fast(self, other: Outcome) -> bool:
        """Return whether the difference from another trial may be chance: it lies within its 95 % interval.

        Example:
            >>> best = Outcome(Trial(1, 1), step=1.0, epoch=8.0, uncertainty=0.05)
            >>> [best.may_be_as_fast(Outcome(Trial(2, 1), step, 8 * step, uncertainty=0.01)) for step in (1.04, 1.1)]
            [True, False]
        """
        if self.failure or other.failure:
            return False
        errors = (each.uncertainty * each.cost / max(each.step, 1e-9) for each in (self, other))
        return abs(self.cost - other.cost) < math.hypot(*errors)

    def against_plain(self, plain: Outcome) -> str:
        """Return a sentence that compares the fastest setting with plain ``fit``; "" if one was not measured.

        Example:
            >>> best = Outcome(Trial(2, 1), step=1.0, epoch=8.0, uncertainty=0.05)
            >>> for step, uncertainty in ((0.5, 0), (1.04, 0), (2.0, 0), (2.0, 3.0)):
            ...     print(best.against_plain(Outcome(Trial(1, 2, plain=True), step, 8 * step, uncertainty=uncertainty)))
            Plain fit (one process, all cores) takes 0.50 times as long: it is faster here.
            Plain fit (one process, all cores) takes about as long as the fastest setting.
            Plain fit (one process, all cores) takes 2.00 times as long as the fastest setting.
            Plain fit (one process, all cores) takes 2.00 times as long, which may be chance: more --steps show it.
        """
        if self.failure or plain.failure or (self.epoch is None) != (plain.epoch is None):
            return ""
        ratio = plain.cost / max(self.cost, 1e-9)
        words = f"{ratio:.2f} times as long"
        if not self.may_be_as_fast(plain):
            words += ": it is faster here" if ratio < 1 else " as the fastest setting"
        elif 1 / _ALIKE <= ratio <= _ALIKE:
            words = "about as long as the fastest setting"
        else:
            words += ", which may be chance: more --steps show it"
        return f"Plain fit (one process, all cores) takes {words}."

    def text(self) -> str:
        """Return a line of the report."""
        trial = self.trial
        ranks, spin = ("plain", "-") if trial.plain else (trial.ranks, trial.blocktime)
        words = f"{ranks:>5} {trial.threads:>7} {'yes' if trial.bind else 'no':>5} {spin:>9} "
        if self.failure:
            return f"{words} failed: {self.failure.splitlines()[-1]}"
        epoch = "" if self.epoch is None else f"{self.epoch:>9.3g}"
        return f"{words} {1e3 * self.step:>9.3g} {epoch:>9}"


HEAD = "ranks threads bound blocktime   ms/step   s/epoch"


def grid(ranks: Iterable[int], threads: Sequence[int], cores: int) -> list[Trial]:
    """Return the trials of ranks and threads that fit on the cores.

    Args:
        ranks: numbers of ranks.
        threads: numbers of threads. Empty: as many as a rank has cores, and half of them.
        cores: int. Cores of this machine.

    Example:
        >>> [(trial.ranks, trial.threads) for trial in grid([1, 2], [], cores=4)]
        [(1, 4), (1, 2), (2, 2), (2, 1)]
    """
    trials = []
    for count in ranks:
        share = max(1, cores // count)
        counts = threads or dict.fromkeys((share, max(1, share // 2)))
        trials += [Trial(count, number) for number in counts if count * number <= max(cores, count)]
    return trials


def search(
    trials: Sequence[Trial], bindings: Sequence[bool], blocktimes: Sequence[int], run: Callable[[Trial], Outcome]
) -> Iterator[Outcome]:
    """Yield the outcomes: first of ranks and threads, then of binding and spin time with the best of these, if any.

    A script without a fit ends the search.

    Args:
        trials: a result of ``grid``.
        bindings: the values of ``bind`` to try.
        blocktimes: the values of ``blocktime`` to try.
        run: runs a trial.

    Example:
        >>> def run(trial):
        ...     return Outcome(trial, step=1 / trial.ranks + (0 if trial.bind else 1))
        >>> trials = [Trial(1, 2), Trial(2, 1)]
        >>> [outcome.trial.bind for outcome in search(trials, [True, False], [0], run)]
        [True, True, False]
    """
    outcomes = []
    for trial in trials:
        outcomes.append(run(replace(trial, bind=bindings[0], blocktime=blocktimes[0])))
        yield outcomes[-1]
        if outcomes[-1].no_fit:
            return
    if all(outcome.failure for outcome in outcomes):
        return
    best = min(outcomes, key=lambda outcome: outcome.cost).trial
    for bind, blocktime in list(product(bindings, blocktimes))[1:]:
        yield run(replace(best, bind=bind, blocktime=blocktime))


def run_trial(trial: Trial, target: Sequence[str], settings: TuneSettings, timeout: float) -> Outcome:
    """Start the script's ranks, wait until they have made the measured steps, and end them.

    Args:
        trial: Trial.
        target: the script and its arguments, or "-m" and a module.
        settings: the steps. Its file is replaced.
        timeout: float. Seconds after which the trial has failed.
    """
    with tempfile.TemporaryDirectory(prefix="choros-tune-") as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        variables = {TUNE: replace(settings, path=str(result), plain=trial.plain).text()}
        wrapper = [sys.executable, "-m", "choros.tools.tune.rank", *target]
        command = [sys.executable, "-m", "choros", "run", *trial.options, "--", *wrapper]
        with log.open("w") as output:
            job = subprocess.Popen(
                command,
                env={**os.environ, **trial.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            limit = time.monotonic() + timeout
            while job.poll() is None and not result.exists() and time.monotonic() < limit:
                time.sleep(_POLL)
        finally:
            _end(job)
        if result.exists():
            return Outcome(trial, **json.loads(result.read_text()))
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-_LAST:]
        no_fit = False
        if time.monotonic() >= limit:
            lines.append(f"no {counted(settings.steps, 'step')} in {timeout:g} s")
        elif job.returncode == 0:
            seen_file = Path(f"{result}{SEEN}")
            seen = json.loads(seen_file.read_text()) if seen_file.exists() else {"fits": 1, "steps": 0}
            no_fit = not seen["fits"]
            lines.append(_too_short(settings, **seen))
        failure = "\n".join(lines) or f"exit code {job.returncode}, and no output"
        return Outcome(trial, failure=failure, no_fit=no_fit)


def _too_short(settings: TuneSettings, fits: int, steps: int) -> str:
    """Return the reason why a script that ended without an error was not measured, and the remedy."""
    if not fits:
        return (
            "the script ended, and no fit was seen: tune measures the steps of keras.Model.fit or choros.Trainer.fit, "
            "so give a script that calls one of them"
        )
    needed = settings.warmup + settings.steps
    return (
        f"the script ended after {counted(steps, 'step')} of fit, and {needed} are needed (--warmup {settings.warmup} "
        f"+ --steps {settings.steps}): train longer, or give smaller numbers"
    )


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job: by SIGTERM, which ``choros run`` passes on to its ranks, or by SIGKILL of all its processes."""
    if job.poll() is None:
        job.terminate()
    try:
        job.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(_PATIENCE)
