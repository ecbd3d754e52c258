"""The threads of a rank, from its cores and from the other ranks on them.

``choros run`` and ``Trainer`` set the thread variables of the processes that they start. Under another launcher each
rank sets them itself, before its backend starts: when a framework is imported after Choros, in ``hvd.init()``, and in
``Trainer``. A variable that the user has set stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from choros.cluster.hardware.cpu_affinity import plan, usable_cores
from choros.cluster.hardware.thread_env import NAMES, variables
from choros.cluster.launcher_env import tables
from choros.cluster.rank_info import Place

_PROC = Path("/proc")
_MAX_ANCESTORS = 16


def shares_cores(place: Place) -> bool:
    """Return whether other ranks of this host may run on the cores of this rank.

    They may if the launcher has bound no rank: this rank may then use all cores of the host, of its SLURM allocation,
    or of the launcher's process.

    Args:
        place: the place of this process.

    Example:
        >>> shares_cores(Place())
        False
    """
    usable = usable_cores()
    if place.local_size == 1:
        return False
    if len(usable) >= (os.cpu_count() or 1):
        return True
    if place.launcher == "slurm":
        allotted = os.environ.get("SLURM_CPUS_ON_NODE", "")
        return allotted.isdecimal() and len(usable) >= int(allotted)
    return launcher_cores(place) == set(usable)


def launcher_cores(place: Place) -> set[int]:
    """Return the cores of the launcher's process on this host: the nearest ancestor that is not a part of the rank.

    Args:
        place: the place of this process. Ancestors with the variable of its rank, such as a shell, belong to the rank.
    """
    names = [name for table in tables() if table.launcher == place.launcher for name in table.rank]
    marks = [f"{name}={os.environ[name]}".encode() for name in names if name in os.environ]
    process = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        try:
            matching = set(marks) & set((_PROC / str(process) / "environ").read_bytes().split(b"\0"))
        except OSError:  # another user's process is not the rank's
            matching = set()
        if not matching:
            break
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        process = int(fields[1])
    try:
        return set(os.sched_getaffinity(process))
    except (AttributeError, OSError):
        return set()


def missing_variables(place: Place, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the thread variables that neither the user nor the launcher has set, with the values for this rank.

    Args:
        place: the place of this process. A rank without other ranks gets no variables.
        environ: an environment. Defaults to ``os.environ``.

    Example:
        >>> missing_variables(Place())
        {}
        >>> missing_variables(Place(1, 2, 1, 2), {"NPROC": "4"})["KMP_BLOCKTIME"]
        '0'
    """
    environ = os.environ if environ is None else environ
    if place.size == 1 or all(name in environ for name in NAMES):
        return {}
    shared = shares_cores(place)
    threads = plan(place.local_size if shared else 1, bind=False)[0].threads
    crowded = shared and place.local_size * threads > len(usable_cores())
    return variables(threads, keep=environ, shared=crowded, bound=not shared)


def limit_threads(place: Place | None = None) -> None:
    """Set the missing thread variables of this rank, and the threads of PyTorch if it is loaded already.

    JAX and TensorFlow read the variables when they start, PyTorch and numpy when they are imported. A backend that has
    started keeps its threads.

    Args:
        place: the place of this process. Defaults to the place in its launcher's variables.

    Raises:
        InvalidInputError: the launcher's variables contradict each other.
    """
    if all(name in os.environ for name in NAMES):
        return
    missing = missing_variables(Place.here() if place is None else place)
    os.environ.update(missing)
    torch: Any = sys.modules.get("torch")
    if "OMP_NUM_THREADS" in missing and hasattr(torch, "set_num_threads"):  # absent while torch is being imported
        torch.set_num_threads(int(missing["OMP_NUM_THREADS"]))
