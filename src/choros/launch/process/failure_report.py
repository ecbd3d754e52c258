"""Error messages for the end of a worker: the cause, the rank, and what to do."""

from __future__ import annotations

import contextlib
import platform
import sys
import traceback
from typing import Any

from choros.cluster.hardware.peak_memory import peak_memory
from choros.errors import WorkerFailedError
from choros.launch.process.frame import Message

_MOST_TEXT = 1 << 17
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
    "choros.errors.NotSerializableError": "Let it return numbers, text, arrays, or what pickle takes.",
}
_DEFAULT = "The traceback names the line; the same code with {alone} is easier to debug."
_DEFAULT_DIED = "The last lines that it printed may say why; the same code with {alone} is easier to debug."
_ALONE = {"worker": "workers=1", "rank": "num_proc=1"}


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


def raised(error: BaseException) -> Message:
    """Return the ``failed`` event of an exception, small enough to be made when memory is short.

    Args:
        error: the exception; the frames of its traceback are cleared.

    Returns:
        Dict of JSON types: type, message, traceback, host, peak memory in bytes, and the ranks in ``error.missing``.

    Example:
        >>> event = raised(ValueError("wrong"))
        >>> event["event"], event["type"], event["message"]
        ('failed', 'ValueError', 'wrong')
    """
    peak = peak_memory()
    name = type(error).__qualname__
    try:
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        text = str(error)[-_MOST_TEXT:]
        lines = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
    except BaseException as second:  # a broken __str__, or no memory even for this
        text, lines = "", f"{name} (its text could not be made: {type(second).__name__})"
    traceback.clear_frames(error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    event: Message = {"event": "failed", "type": name, "message": text, "traceback": lines}
    event |= {"host": platform.node(), "peak_memory": peak}
    missing = getattr(error, "missing", None)
    if isinstance(missing, tuple) and all(isinstance(rank, int) for rank in missing):
        event["missing"] = list(missing)
    return event


def is_echo(event: Message) -> bool:
    """Return whether an event reports only that another worker ended or did not connect.

    Args:
        event: an event from ``Pool.receive``.
    """
    return event.get("event") == "failed" and str(event.get("type")) in (
        "choros.errors.PeerLostError",
        "choros.errors.CommTimeoutError",
    )


def failure(
    rank: int, size: int, event: Message, weights: list[Any] | None = None, what: str = "worker"
) -> WorkerFailedError:
    """Return the exception for a ``failed`` or ``died`` event.

    Args:
        rank: the rank of the event.
        size: the number of workers.
        event: an event from ``Pool.receive``.
        weights: the last center variable, kept as ``error.weights``. Defaults to None.
        what: ``"worker"`` (default), or ``"rank"`` for ranks of ``choros.run``.

    Returns:
        The exception, which the caller raises.

    Example:
        >>> event = {"event": "died", "signal": "SIGKILL", "exit": -1, "peak_memory": 1_200_000_000, "host": "n1"}
        >>> str(failure(1, 2, event)).partition(" (peak")[0]
        'worker 1 of 2 (counted from 0) on host n1 was ended by SIGKILL'
    """
    host, peak = str(event.get("host", "")), int(event.get("peak_memory", 0))
    name, lines, output = str(event.get("signal", "")), str(event.get("traceback", "")), str(event.get("output", ""))
    rank_name = f"{what} {rank} of {size} (counted from 0) on host {host}"
    memory = f"peak memory {amount(peak)}" if peak else "peak memory unknown"
    if event.get("event") == "failed":
        kind, text = str(event.get("type", "an exception")), str(event.get("message", ""))
        fate = f"raised {kind}" + (f": {text}" if text else "")
        fate += f" ({memory})" if kind.endswith("MemoryError") else ""
        remedy = _REMEDIES.get(kind, _DEFAULT)
    elif name:
        cause, known = signalled(name)
        fate = f"was ended by {name} ({memory}" + (f"; {cause})" if cause else ")")
        remedy = known or _DEFAULT_DIED
    else:
        fate = f"ended with exit code {event.get('exit', -1)} before its work was done ({memory})"
        remedy = _DEFAULT_DIED
    message = f"{rank_name} {fate}"
    if lines:
        message += f"\n\nIts traceback:\n{lines.rstrip()}"
    if output.strip():
        message += f"\n\nThe last lines that it printed:\n{output.rstrip()}"
    message += f"\n\n{remedy.format(alone=_ALONE[what])}"
    return WorkerFailedError(
        message,
        rank=rank,
        host=host,
        traceback=lines,
        signal=name,
        peak_memory=peak,
        output=output,
        weights=weights,
    )
