"""The choice of the ranks' group, made without importing any library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import NamedTuple

from choros.cluster import Place, meets_by_mpi
from choros.cluster.launcher_env import points_of
from choros.errors import InvalidInputError

GROUPS = "choros.groups"  # the entry points by which an installed package adds a group
SHARED, MPI, TCP, OTHERS = "shared", "mpi", "tcp", "others"
NAMED = (SHARED, MPI, TCP)  # names in CHOROS_COMM of groups that make their sums themselves
LIBRARIES = ("torch", "jax")  # and of libraries that make the large sums of whatever the ranks meet in
_BY_PLACE = "Start it with `choros run -n RANKS script.py`, or with the mpiexec or srun of an MPI"


class Choice(NamedTuple):
    """The kind of a group: ``SHARED`` (by descriptor, or set up by MPI), ``MPI``, ``TCP`` or ``OTHERS``.

    Attributes:
        kind: str. words: str. The same for people. points: the entry points to try, in this order. sums: str. The
            library that was asked to make the large sums; "" where none was.
    """

    kind: str
    words: str
    points: tuple[EntryPoint, ...] = ()
    sums: str = ""


def choose(place: Place, environ: Mapping[str, str] | None = None) -> Choice:
    """Choose what the ranks of a job meet in.

    The memory that ``choros run`` brings; MPI, where its launcher started the ranks; what an installed package adds by
    an entry point of ``choros.groups``, by name the first that takes the job; sockets, where torchrun started the ranks
    or ``CHOROS_SECRET`` holds what only this job's ranks know. ``CHOROS_COMM`` names one: ``shared`` (under an MPI
    launcher too, where all ranks are on one machine), ``mpi``, ``tcp``, or such an entry point. ``torch`` and ``jax``
    name a library that makes the large sums, whichever of shared memory, MPI and sockets the ranks meet in.

    Args:
        place: this process's.
        environ: what to read instead of ``os.environ``.

    Raises:
        InvalidInputError: there is none, or none of the name in ``CHOROS_COMM``.

    Example:
        >>> choose(Place(0, 2, 0, 2, launcher="mpich"), {}).kind
        'mpi'
    """
    environ = os.environ if environ is None else environ
    asked = environ.get("CHOROS_COMM", "")
    if asked not in LIBRARIES:
        return _choose(place, asked, environ, points_of(GROUPS))
    beneath = _choose(place, "", environ, ())
    return beneath._replace(words=f"{beneath.words}; large sums by {asked} (CHOROS_COMM)", sums=asked)


def _choose(place: Place, asked: str, environ: Mapping[str, str], found: tuple[EntryPoint, ...]) -> Choice:
    brought, by_mpi = environ.get("CHOROS_COMM_FD"), meets_by_mpi(place.launcher)
    if asked in ("", SHARED) and brought:
        return Choice(SHARED, "shared memory, brought by choros run")
    if asked == SHARED and by_mpi:
        return Choice(SHARED, "shared memory (CHOROS_COMM=shared), found by MPI")
    secret = environ.get("CHOROS_SECRET")
    if not asked and by_mpi and secret and find_spec("mpi4py") is None:
        return Choice(TCP, "sockets (TCP), by a secret (CHOROS_SECRET), as mpi4py is not installed")
    if asked == MPI or (not asked and by_mpi):
        return Choice(MPI, "MPI" + (" (CHOROS_COMM=mpi)" if asked else f", as {place.launcher} started the ranks"))
    if asked == TCP or (not found and (place.launcher == "torchrun" or secret)):
        by = "torchrun's store" if place.launcher == "torchrun" else "a secret (CHOROS_SECRET)"
        return Choice(TCP, f"sockets (TCP), by {by}" + (", CHOROS_COMM=tcp" if asked else ""))
    if asked and asked != SHARED:
        if named := tuple(point for point in found if point.name == asked):
            return Choice(OTHERS, f"{asked} (CHOROS_COMM), by {named[0].value}", named)
        known = ", ".join([*NAMED, *LIBRARIES, *(point.name for point in found)])
        raise InvalidInputError(
            f"CHOROS_COMM={asked!r} is none of: {known}. Unset it, or install the package that brings it."
        )
    if found and not asked:
        return Choice(OTHERS, "the first that takes the job of " + ", ".join(p.name for p in found), found)
    raise InvalidInputError(
        f"This process is a rank of a job ({place.launcher} says {place.size}) that brings no shared memory for its "
        f"ranks and whose launcher is not of MPI. {_BY_PLACE}; or set CHOROS_SECRET to the same 64 random hexadecimal "
        "digits on all ranks, who then meet by sockets; or unset the launcher's variables to train with workers of its "
        "own."
    )
