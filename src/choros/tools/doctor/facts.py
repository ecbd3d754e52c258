"""Facts about one rank, collected with the standard library, so that they are available if other packages fail."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from choros.backend_choice import is_installed, keras_backend, named_backend
from choros.cluster import Place, why
from choros.cluster.hardware import cpu_features, physical_cores, usable_cores, version
from choros.cluster.hardware.gpus import DEVICE_VARIABLES, count_gpus
from choros.cluster.hardware.interfaces import interfaces
from choros.cluster.hardware.thread_env import NAMES
from choros.cluster.rank_threads import missing_variables
from choros.comm.bootstrap.select import MPI, SHARED, choose
from choros.errors import InvalidInputError
from choros.tools.doctor import limits, network_facts

# The facts about one rank, in JSON types.
Facts = dict[str, Any]

LIBRARIES = ("choros", "keras", "numpy", "jax", "jaxlib", "torch", "tensorflow", "mpi4py")
SUBMITTED = "CHOROS_SUBMIT_CPU"  # the CPU features of the machine that submitted the job
_SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "SLURM_NTASKS", "PBS_JOBID", "PBS_NODEFILE", "LSB_JOBID", "LSB_DJOB_NUMPROC")
_NODES = Path("/sys/devices/system/node")
_MOST_NAMES = 64
# Launchers whose process, the rank's parent, is bound to the cores of the allocation; that of srun has all cores.
_LAUNCHERS_BOUND_TO_ALLOCATION = ("choros", "openmpi", "mpich", "mvapich", "torchrun")


def look(place: Place) -> Facts:
    """Return all facts about this rank that need no communication.

    Args:
        place: the place of this process.

    Returns:
        A dict in JSON types.

    Example:
        >>> found = look(Place())
        >>> found["rank"], found["size"], found["cores"]["usable"] == list(usable_cores())
        (0, 1, True)
    """
    host = platform.node()
    group, engine = _group(place)
    return {
        **{name: getattr(place, name) for name in ("rank", "size", "local_rank", "local_size", "launcher")},
        "hosts": list(place.hosts),
        "why": why(),
        "group": group,
        "engine": engine,
        "host": host,
        "machine": host,  # replaced once the ranks communicate
        "scheduler": {name: os.environ[name] for name in _SCHEDULER_VARIABLES if os.environ.get(name)},
        "cores": _cores(place),
        "threads": {name: os.environ[name] for name in NAMES if os.environ.get(name)},
        "chosen": missing_variables(place),
        "memory": limits.memory(),
        "shm": limits.shared_memory(),
        "files": limits.open_files(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "backend": keras_backend(),
        "backend_installed": is_installed(named_backend()[0]),
        "features": list(cpu_features()),
        "submitted": os.environ.get(SUBMITTED, "").split(),
        "devices": {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ},
        "gpus": max(count_gpus(), len(list(Path("/dev").glob("nvidia[0-9]*")))),  # also without a driver
        "directory": _directory(),
        "interfaces": interfaces(),
        "fabrics": network_facts.fabrics(),
        "network": network_facts.variables(),
        "names": network_facts.look_up([host, *[name for name in place.hosts if name != host][:_MOST_NAMES]]),
    }


def _group(place: Place) -> tuple[str, str]:
    """Return the way in which ranks communicate: a description, and the name of an engine."""
    if place.size == 1:
        return "none needed: one rank", ""
    try:
        choice = choose(place)
    except InvalidInputError as error:
        return f"none: {error}", ""
    return choice.description, {SHARED: "shared memory", MPI: "MPI"}.get(choice.kind, "the package's")


def _cores(place: Place) -> dict[str, Any]:
    """Return facts about the cores that this rank may use, and those of the machine."""
    allotted: list[int] = []
    if place.launcher in _LAUNCHERS_BOUND_TO_ALLOCATION and hasattr(os, "sched_getaffinity"):
        try:
            allotted = sorted(os.sched_getaffinity(os.getppid()))
        except OSError:
            allotted = []
    return {
        "usable": list(usable_cores()),
        "physical": len(physical_cores()),
        "machine": os.cpu_count() or 1,
        "allotted": allotted,
        "numa": _numa(),
        "quota": limits.quota(),
    }


def _numa() -> list[list[int]]:
    """Return the cores of each NUMA node that has cores."""
    folders = []
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            text = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
        if cores := [core for entry in ends for core in range(entry[0], entry[-1] + 1)]:
            folders.append(cores)
    return folders


def _directory() -> dict[str, Any]:
    try:
        path = os.getcwd()
        status = os.stat(path)
    except OSError as error:  # the directory was removed
        return {"path": f"gone ({error.strerror})", "inode": 0}
    return {"path": path, "inode": status.st_ino}
