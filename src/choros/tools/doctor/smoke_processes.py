"""Helper processes of a rank, which may die without the rank: one imports libraries, one trains on a backend."""

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

SECONDS = 180.0  # time limit for one backend
EXACT = (
    5e-3  # largest difference of a weight from numpy's: above the effect of a GPU's reduced precision, below a fault
)
_TAIL = 1500  # most bytes of the last output of a process
_PROBES = {
    "numpy": "import numpy; x = numpy.ones((64, 64), 'float32'); assert (x @ x).sum() == 64 ** 3",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI",
}
# Ranks may share a GPU in these trainings.
_SPARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
_OUT = ("HOROVOD_TIMELINE", "CHOROS_COMM", "CHOROS_CALL", "CHOROS_DOCTOR")

# The outcome of a helper process, in JSON types.
End = dict[str, Any]


def beside(argv: Sequence[str], environment: Mapping[str, str], seconds: float, fds: Sequence[int] = ()) -> End:
    """Run a process that ends with this one, and return its outcome.

    Args:
        argv: the command.
        environment: the complete environment.
        seconds: time limit, after which the process is killed.
        fds: file descriptors that the process inherits.

    Returns:
        ``signal`` (a name, or ``""``), ``exit``, ``late`` (killed at the time limit), ``peak`` (bytes of memory),
        ``said`` (its last line on stdout) and ``tail`` (its last output on stderr).

    Example:
        >>> beside([sys.executable, "-c", "print(7)"], os.environ, 60.0)["said"]
        '7'
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = Child(exec_stub.with_stub(argv), environment, pass_fds=fds, stdout=out.fileno(), stderr=errors.fileno())
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
    """Import libraries in helper processes, before this process imports them.

    Args:
        libraries: ``numpy``, ``mpi4py``.
        seconds: time limit for each library. Defaults to 60.

    Returns:
        The outcomes of the libraries that failed.

    Example:
        >>> probe(["numpy"])
        {}
    """
    results = {}
    for name in libraries:
        end = beside([sys.executable, "-c", _PROBES[name]], {**os.environ, **python_variables()}, seconds)
        if end["signal"] or end["exit"] != 0:
            results[name] = end
    return results


def train(backend: str, rank: int, size: int, fd: int | None, seconds: float = SECONDS) -> End:
    """Train on one backend in a helper process, with the helper processes of the other ranks of this machine.

    Args:
        backend: Keras' name of the backend.
        rank: the local rank on this machine.
        size: number of local ranks.
        fd: the descriptor of their shared memory; None for one rank.
        seconds: time limit, after which the process is killed. Defaults to 180.

    Returns:
        The outcome as for ``beside``, with ``backend``, ``difference`` (from numpy's weights) and ``gpus`` (their
        number on the backend). The last two are None if the training failed.
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
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        answer = json.loads(end["said"]) if end["said"].startswith('{"difference"') else {}
    return {**end, "gpus": None, "difference": None, **answer, "backend": backend}
