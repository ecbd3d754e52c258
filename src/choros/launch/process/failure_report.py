"""Error messages for the end of a worker: the cause, the rank, and what to do."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from choros.cluster.hardware.peak_memory import peak_memory
from choros.errors import WorkerFailedError
from choros.launch.process.child_process import ExitStatus

_MOST_TEXT = 1 << 17
# Frames within the text of an exception, as JAX has them for a callback that raises: the cause comes after them.
_FRAMES = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+")
_SIGNALS = {
    "SIGKILL": "the kernel's out-of-memory killer sends this signal",
    "SIGSEGV": "a native library crashed",
    "SIGBUS": "a native library crashed, or /dev/shm or the disk is full",
    "SIGABRT": "a native library gave up",
    "SIGILL": "a native library was built for another processor than this host's",
    "SIGFPE": "a native library divided by zero",
    "SIGTERM": "a user or the batch system ended it",
}
_REMEDIES = {
    "SIGKILL": "If memory ran out, use fewer workers, a smaller batch or a smaller model; dmesg names the process.",
    "SIGILL": "Install the libraries (numpy, jaxlib, torch, tensorflow, MPI) on a host with this processor, or choose "
    "hosts like the one where they were installed.",
    "SIGTERM": "If a batch system sent it, ask for more time.",
    "MemoryError": "Use fewer workers, a smaller batch or a smaller model.",
    "ModuleNotFoundError": "Install the module, or put its folder on sys.path of the calling process.",
    "ImportError": "Install the module, or put its folder on sys.path of the calling process.",
    "_pickle.UnpicklingError": "The traceback names the class. Let its __getattr__, __new__ or __setstate__ work "
    "before __init__ has run, or give it a __reduce__; pickle.loads(pickle.dumps(object)) must work.",
    "choros.errors.NotSerializableError": "Let it return numbers, text, arrays, or what pickle takes.",
}
_DEFAULT = "The traceback names the line; the same code with {alone} is easier to debug."
_DEFAULT_DIED = "The last lines that it printed may say why; the same code with {alone} is easier to debug."
_AGAIN = "With restarts=3 (KerasEstimator: maxRestarts=3) a worker that dies starts again; checkpoint= saves the state."
_ALONE = {"worker": "workers=1", "rank": "num_proc=1"}


@dataclass(frozen=True)
class RankFailure:
    """Report of a rank that raised an exception, or whose process ended.

    Attributes:
        type, message, traceback: str. Of the exception; "" if the process ended without one.
        host: str. The name of the rank's host.
        peak_memory: int. Bytes; 0 if unknown.
        signal: str. The name of the signal that ended the process, or "".
        exit: int. The exit code; -1 after a signal, or if it is unknown.
        output: str. The last lines that the rank printed.
        missing: list of int. The ranks in ``error.missing``, for which the rank waited in vain.
    """

    type: str = ""
    message: str = ""
    traceback: str = ""
    host: str = ""
    peak_memory: int = 0
    signal: str = ""
    exit: int = -1
    output: str = ""
    missing: list[int] = field(default_factory=list)

    @classmethod
    def of_process(cls, ended: ExitStatus, report: RankFailure | None = None) -> RankFailure:
        """Return the report of a process of this host that has ended; ``report``: its own report of an exception."""
        return replace(
            report or cls(),
            host=platform.node(),
            signal=ended.signal,
            exit=ended.exit,
            peak_memory=ended.peak_memory,
        )

    @property
    def died(self) -> bool:
        """True if the process ended without a report of an exception."""
        return not self.type

    @property
    def is_echo(self) -> bool:
        """True if the rank failed only because another rank had ended or did not connect."""
        return self.type in ("choros.errors.PeerLostError", "choros.errors.CommTimeoutError")


def amount(size: int) -> str:
    """Return a number of bytes as text, with a decimal unit.

    Args:
        size: int. Bytes.

    Example:
        >>> amount(1_234_567_890), amount(3_000)
        ('1.2 GB', '3.0 kB')
    """
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}"


def signalled(name: str) -> tuple[str, str]:
    """Return the usual cause of a signal that ended a process, and what to do.

    Args:
        name: the name of the signal.

    Returns:
        Two texts, each "" if unknown.

    Example:
        >>> signalled("SIGILL")[0]
        "a native library was built for another processor than this host's"
        >>> signalled("SIGUSR1")
        ('', '')
    """
    return _SIGNALS.get(name, ""), _REMEDIES.get(name, "") if name in _SIGNALS else ""


def raised(error: BaseException) -> RankFailure:
    r"""Return the report of an exception in this process, small enough to be made when memory is short.

    Args:
        error: the exception; the frames of its traceback are cleared.

    Example:
        >>> report = raised(ValueError("wrong"))
        >>> report.type, report.message
        ('ValueError', 'wrong')
        >>> raised(ValueError("callback: Traceback (most recent call last):\n  File 1\nTypeError: x")).message
        'callback: TypeError: x'
    """
    peak = peak_memory()
    name = type(error).__qualname__
    try:
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        text = _FRAMES.sub("", str(error)[-_MOST_TEXT:])
        lines = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
    except BaseException as second:  # a broken __str__, or no memory even for this
        text, lines = "", f"{name} (its text could not be made: {type(second).__name__})"
    # The frames refer to the model and the data, which would stay in memory as long as the exception.
    traceback.clear_frames(error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    missing = getattr(error, "missing", None)
    known = isinstance(missing, tuple) and all(isinstance(rank, int) for rank in missing)
    return RankFailure(name, text, lines, platform.node(), peak, missing=list(missing or ()) if known else [])


def first_cause(reports: Mapping[int, RankFailure]) -> int:
    """Return the first rank that did not fail only because of another rank; if there is none, the first rank.

    Example:
        >>> first_cause({0: RankFailure("choros.errors.PeerLostError"), 3: RankFailure("ValueError")})
        3
    """
    return next((rank for rank, report in reports.items() if not report.is_echo), next(iter(reports)))


def failure(
    rank: int,
    size: int,
    report: RankFailure,
    weights: list[Any] | None = None,
    what: str = "worker",
    alone: str = "",
) -> WorkerFailedError:
    """Return the exception for the report of a rank.

    Args:
        rank: the rank.
        size: the number of workers.
        report: RankFailure.
        weights: the last center variable, kept as ``error.weights``. Defaults to None.
        what: ``"worker"`` (default), or ``"rank"`` for ranks of ``choros.run``.
        alone: the call that runs the same code in one process, for the advice. Defaults to that of ``what``.

    Returns:
        The exception, which the caller raises.

    Example:
        >>> report = RankFailure(signal="SIGKILL", peak_memory=1_200_000_000, host="n1")
        >>> str(failure(1, 2, report)).partition(" (peak")[0]
        'worker 1 of 2 (counted from 0) on host n1 was ended by SIGKILL'
    """
    rank_name = f"{what} {rank} of {size} (counted from 0) on host {report.host}"
    memory = f"peak memory {amount(report.peak_memory)}" if report.peak_memory else "peak memory unknown"
    if not report.died:
        fate = f"raised {report.type}" + (f": {report.message}" if report.message else "")
        fate += f" ({memory})" if report.type.endswith("MemoryError") else ""
        remedy = _REMEDIES.get(report.type, _DEFAULT)
    elif report.signal:
        cause, known = signalled(report.signal)
        fate = f"was ended by {report.signal} ({memory}" + (f"; {cause})" if cause else ")")
        remedy = known or _DEFAULT_DIED
    else:
        fate = f"ended with exit code {report.exit} before its work was done ({memory})"
        remedy = _DEFAULT_DIED
    message = f"{rank_name} {fate}"
    if report.traceback:
        message += f"\n\nIts traceback:\n{report.traceback.rstrip()}"
    if report.output.strip():
        message += f"\n\nThe last lines that it printed:\n{report.output.rstrip()}"
    message += f"\n\n{remedy.format(alone=alone or _ALONE[what])}"
    if report.died and what == "worker":
        message += f"\n{_AGAIN}"
    return WorkerFailedError(
        message,
        rank=rank,
        host=report.host,
        traceback=report.traceback,
        signal=report.signal,
        peak_memory=report.peak_memory,
        output=report.output,
        weights=weights,
    )
