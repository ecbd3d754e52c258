"""Selection of the job's process group, without an import of any library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

from choros.cluster import Place, connects_by_mpi
from choros.cluster.launcher_env import points_of
from choros.errors import InvalidInputError

ENTRY_POINT_GROUP = "choros.groups"  # entry points of installed packages that add a group
SHARED, MPI, TCP, ENTRY_POINT = "shared", "mpi", "tcp", "others"
BUILT_IN = (SHARED, MPI, TCP)  # names in CHOROS_COMM of groups that compute their own sums
OFFLOAD_LIBRARIES = ("torch", "jax")  # names in CHOROS_COMM of libraries that compute the large sums of any group
_LAUNCH_ADVICE = "Start it with `choros run -n RANKS script.py`, or with the mpiexec or srun of an MPI"


class Choice(NamedTuple):
    """The kind of a group: ``SHARED`` (by descriptor, or set up by MPI), ``MPI``, ``TCP`` or ``ENTRY_POINT``.

    Attributes:
        kind: str.
        description: str. The kind and its reason, for messages.
        points: tuple of entry points to try, in this order.
        offload: str. Library for the large sums; "" for none.
    """

    kind: str
    description: str
    points: tuple[EntryPoint, ...] = ()
    offload: str = ""


def choose(place: Place, environ: Mapping[str, str] | None = None) -> Choice:
    """Choose the process group of a job.

    It is the first of these that applies:

    1. shared memory, if ``choros run`` provides a segment;
    2. MPI, if an MPI launcher started the ranks;
    3. a group of an installed package (entry points of ``choros.groups``), the first by name that accepts the job;
    4. TCP, if torchrun started the ranks or ``CHOROS_SECRET`` has the job's secret.

    ``CHOROS_COMM`` selects one: ``shared`` (also under an MPI launcher with all ranks on one machine), ``mpi``,
    ``tcp``, or the name of an entry point. With ``mpi`` the vectors of a center between hosts go by MPI too. ``torch``
    and ``jax`` name a library that computes the large sums on top of shared memory, MPI or TCP.

    Args:
        place: Place. This process's place.
        environ: mapping to read instead of ``os.environ``. Defaults to None.

    Raises:
        InvalidInputError: no group applies, or none has the name in ``CHOROS_COMM``.

    Example:
        >>> choose(Place(0, 2, 0, 2, launcher="mpich"), {}).kind
        'mpi'
    """
    environ = os.environ if environ is None else environ
    requested = environ.get("CHOROS_COMM", "")
    if requested not in OFFLOAD_LIBRARIES:
        return _choose(place, requested, environ, points_of(ENTRY_POINT_GROUP))
    control = _choose(place, "", environ, ())
    return control._replace(
        description=f"{control.description}; large sums by {requested} (CHOROS_COMM)", offload=requested
    )


def check_name(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a ``CHOROS_COMM`` that names nothing, also in a process without other ranks.

    Args:
        environ: mapping to read instead of ``os.environ``. Defaults to None.

    Raises:
        InvalidInputError: no group and no library has the name.

    Example:
        >>> check_name({"CHOROS_COMM": "tcp"})
    """
    requested = (os.environ if environ is None else environ).get("CHOROS_COMM", "")
    if requested not in ("", *BUILT_IN, *OFFLOAD_LIBRARIES):
        installed = points_of(ENTRY_POINT_GROUP)
        if requested not in [point.name for point in installed]:
            _refuse(requested, installed)


def _refuse(requested: str, installed: tuple[EntryPoint, ...]) -> NoReturn:
    names = ", ".join([*BUILT_IN, *OFFLOAD_LIBRARIES, *(point.name for point in installed)])
    raise InvalidInputError(
        f"CHOROS_COMM={requested!r} is none of: {names}. Unset it, or install the package that brings it."
    )


def _choose(place: Place, requested: str, environ: Mapping[str, str], installed: tuple[EntryPoint, ...]) -> Choice:
    shared_fd, by_mpi = environ.get("CHOROS_COMM_FD"), connects_by_mpi(place.launcher)
    if requested in ("", SHARED) and shared_fd:
        return Choice(SHARED, "shared memory, brought by choros run")
    if requested == SHARED and by_mpi:
        return Choice(SHARED, "shared memory (CHOROS_COMM=shared), found by MPI")
    secret = environ.get("CHOROS_SECRET")
    if not requested and by_mpi and secret and find_spec("mpi4py") is None:
        return Choice(TCP, "sockets (TCP), by a secret (CHOROS_SECRET), as mpi4py is not installed")
    if requested == MPI or (not requested and by_mpi):
        return Choice(MPI, "MPI" + (" (CHOROS_COMM=mpi)" if requested else f", as {place.launcher} started the ranks"))
    if requested == TCP or (not installed and (place.launcher == "torchrun" or secret)):
        source = "torchrun's store" if place.launcher == "torchrun" else "a secret (CHOROS_SECRET)"
        return Choice(TCP, f"sockets (TCP), by {source}" + (", CHOROS_COMM=tcp" if requested else ""))
    if requested and requested != SHARED:
        if matching := tuple(point for point in installed if point.name == requested):
            return Choice(ENTRY_POINT, f"{requested} (CHOROS_COMM), by {matching[0].value}", matching)
        _refuse(requested, installed)
    if installed and not requested:
        return Choice(ENTRY_POINT, "the first that takes the job of " + ", ".join(p.name for p in installed), installed)
    raise InvalidInputError(
        f"This process is a rank of a job ({place.launcher} says {place.size}) whose launcher is not an MPI launcher "
        f"and provides no shared memory, so Choros has no way to connect the ranks. {_LAUNCH_ADVICE}; or set "
        "CHOROS_SECRET to the same 64 random hexadecimal digits on all ranks, which then connect by TCP; or unset the "
        "launcher's variables to train with workers of its own."
    )
