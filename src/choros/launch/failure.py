"""A worker's end in words: what happened, on which rank, what to do."""

from __future__ import annotations

from typing import Any

from choros.errors import WorkerFailed
from choros.launch.frame import Message

_SIGNALS = {
    "SIGKILL": "the kernel's out-of-memory killer sends this signal",
    "SIGSEGV": "a native library crashed",
    "SIGBUS": "a native library crashed, or /dev/shm or the disk is full",
    "SIGABRT": "a native library gave up",
    "SIGILL": "a native library was built for another processor",
    "SIGFPE": "a native library divided by zero",
    "SIGTERM": "somebody, or the batch system, asked it to end",
}
_REMEDIES = {
    "SIGKILL": "If memory ran out, use fewer workers, a smaller batch or a smaller model; dmesg names the process.",
    "SIGTERM": "If a batch system sent it, ask for more time.",
    "MemoryError": "Use fewer workers, a smaller batch or a smaller model.",
    "ModuleNotFoundError": "Install the module, or put its folder on sys.path of the calling process.",
    "ImportError": "Install the module, or put its folder on sys.path of the calling process.",
}
_DEFAULT = "The traceback names the line; the same code with workers=1 is easier to debug."
_DEFAULT_DIED = "The last lines that it printed may say why; the same code with workers=1 is easier to debug."


def amount(size: int) -> str:
    """Bytes in words.

    Args:
        size: bytes.

    Returns:
        With the unit that fits.

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


def failure(rank: int, size: int, event: Message, weights: list[Any] | None = None) -> WorkerFailed:
    """The exception for a ``failed`` or ``died`` event.

    Args:
        rank: whose event it is.
        size: how many workers there are.
        event: as ``Pool.receive`` gave it.
        weights: the last centre, kept as ``error.weights``.

    Returns:
        The exception, to be raised by the caller.

    Example:
        >>> event = {"event": "died", "signal": "SIGKILL", "exit": -1, "peak_memory": 1_200_000_000, "host": "n1"}
        >>> str(failure(1, 2, event)).partition(" (peak")[0]
        'worker 1 of 2 (counted from 0) on host n1 was ended by SIGKILL'
    """
    host, peak = str(event.get("host", "")), int(event.get("peak_memory", 0))
    name, lines, output = str(event.get("signal", "")), str(event.get("traceback", "")), str(event.get("output", ""))
    who = f"worker {rank} of {size} (counted from 0) on host {host}"
    memory = f"peak memory {amount(peak)}" if peak else "peak memory unknown"
    if event.get("event") == "failed":
        kind, text = str(event.get("type", "an exception")), str(event.get("message", ""))
        what = f"raised {kind}" + (f": {text}" if text else "")
        what += f" ({memory})" if kind.endswith("MemoryError") else ""
        remedy = _REMEDIES.get(kind, _DEFAULT)
    elif name:
        what = f"was ended by {name} ({memory}" + (f"; {_SIGNALS[name]})" if name in _SIGNALS else ")")
        remedy = _REMEDIES.get(name, _DEFAULT_DIED)
    else:
        what = f"ended with exit code {event.get('exit', -1)} before its work was done ({memory})"
        remedy = _DEFAULT_DIED
    message = f"{who} {what}"
    if lines:
        message += f"\n\nIts traceback:\n{lines.rstrip()}"
    if output.strip():
        message += f"\n\nThe last lines that it printed:\n{output.rstrip()}"
    message += f"\n\n{remedy}"
    return WorkerFailed(
        message,
        rank=rank,
        host=host,
        traceback=lines,
        signal=name,
        peak_memory=peak,
        output=output,
        weights=weights,
    )
