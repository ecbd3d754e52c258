"""Processes beside a rank that may die in its place: one that loads libraries, one that trains on a backend."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from choros.launch.process import exec_stub
from choros.launch.process.child_process import Child, python_variables

BACKENDS = ("jax", "torch", "tensorflow")
SECONDS = 180.0  # for one backend
EXACT = (
    5e-3  # the most that a weight may differ from numpy's: what a GPU's short floats make of it, and far below a fault
)
_TAIL = 1500  # bytes of what a process printed last
_PROBES = {
    "numpy": "import numpy; x = numpy.ones((64, 64), 'float32'); assert (x @ x).sum() == 64 ** 3",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI",
}
# Ranks may share a GPU here.
_SPARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
_OUT = ("HOROVOD_TIMELINE", "CHOROS_COMM", "CHOROS_CALL", "CHOROS_DOCTOR")

# How a process beside a rank ended, as JSON holds it.
End = dict[str, Any]


def beside(argv: Sequence[str], environment: Mapping[str, str], seconds: float, fds: Sequence[int] = ()) -> End:
    """Run a process that ends with this one, and tell how it ended.

    Args:
        argv: the command.
        environment: all of it.
        seconds: after which it is killed.
        fds: descriptors that it inherits.

    Returns:
        ``signal`` (a name, or ``""``), ``exit``, ``late`` (it was killed), ``peak`` (bytes), ``said`` (its last line on
        stdout) and ``tail`` (the last lines on stderr).

    Example:
        >>> beside([sys.executable, "-c", "print(7)"], os.environ, 60.0)["said"]
        '7'
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-I", "-S", exec_stub.__file__, *argv]
        child = Child(command, environment, pass_fds=fds, stdout=out.fileno(), stderr=errors.fileno())
        ended = late = None
        try:
            ended = child.wait(seconds)
        finally:
            if ended is None:
                late = True
                child.send_signal(signal.SIGKILL)
                ended = child.wait(10.0)
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
        errors.seek(max(errors.seek(0, os.SEEK_END) - _TAIL, 0))
        tail = errors.read().decode(errors="replace").strip()
    return {
        "signal": ended.signal if ended and not late else "",
        "exit": ended.exit if ended else -1,
        "late": bool(late),
        "peak": ended.peak_memory if ended else 0,
        "said": lines[-1] if lines else "",
        "tail": tail,
    }


def probe(libraries: Sequence[str], seconds: float = 60.0) -> dict[str, End]:
    """Load what this process itself is going to need, elsewhere first.

    Args:
        libraries: ``numpy``, ``mpi4py``.
        seconds: for each.

    Returns:
        Of those with which something is wrong, how the process ended.

    Example:
        >>> probe(["numpy"])
        {}
    """
    found = {}
    for name in libraries:
        end = beside([sys.executable, "-c", _PROBES[name]], {**os.environ, **python_variables()}, seconds)
        if end["signal"] or end["exit"] != 0:
            found[name] = end
    return found


def train(backend: str, rank: int, size: int, fd: int | None, seconds: float = SECONDS) -> End:
    """Train on one backend in a process beside this rank, together with those beside the other ranks of this machine.

    Args:
        backend: Keras' name.
        rank: among this machine's ranks.
        size: how many they are.
        fd: the descriptor of the segment in which they meet; None where there is one.
        seconds: after which it is killed.

    Returns:
        As ``beside``, with ``backend``, and ``difference`` (from numpy's weights) and ``gpus`` (that the backend sees),
        each None where it did not come to that.
    """
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    environment = {name: value for name, value in os.environ.items() if name not in _OUT}
    environment |= python_variables() | {f"CHOROS_{name}": str(value) for name, value in place.items()}
    environment |= {"KERAS_BACKEND": backend, "HOROVOD_START_TIMEOUT": str(int(seconds)), **_SPARING}
    environment.pop("CHOROS_COMM_FD", None)
    if fd is not None:
        environment["CHOROS_COMM_FD"] = str(fd)
    argv = [sys.executable, "-P", "-m", "choros.tools.doctor.smoke_train"]
    end = beside(argv, environment, seconds, () if fd is None else (fd,))
    said: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        said = json.loads(end["said"]) if end["said"].startswith('{"difference"') else {}
    return {**end, "gpus": None, "difference": None, **said, "backend": backend}
