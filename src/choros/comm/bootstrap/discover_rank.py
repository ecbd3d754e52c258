"""The place of a rank that is about to meet others: what its launcher tells, or, where it was asked for, what MPI says.

``Place.here()`` reads the environment alone. Where an MPI's launcher tells no place by any name that is known, MPI
itself knows it, but only once it has started, which is right for ranks that meet by it and wrong for all else. So it is
asked where ``CHOROS_COMM=mpi`` says so, and what it said is left in the environment, where ``Place.here()`` reads it.
"""

from __future__ import annotations

import os
import sys

from choros.cluster import Place, strange
from choros.comm.bootstrap.select import MPI
from choros.errors import InvalidInputError


def asks_mpi(place: Place) -> bool:
    """Return whether the ranks will ask MPI for their place when they join.

    Args:
        place: what ``Place.here()`` says.

    Example:
        >>> asks_mpi(Place(0, 2, 0, 2, launcher="mpich"))
        False
    """
    return os.environ.get("CHOROS_COMM") == MPI and place.launcher == "single"


def find_place(timeout: float = 300.0) -> Place:
    """Return this process's place; every rank of a job calls it, before it meets the others.

    Args:
        timeout: float. Seconds that the start of MPI may last, where it is asked. Defaults to 300.

    Raises:
        InvalidInputError: the launcher's variables contradict each other; or an MPI's launcher started this process and
            nothing tells where it is, so the ranks would train apart.

    Example:
        >>> find_place().rank
        0
    """
    refused: InvalidInputError | None = None
    try:
        place = Place.here()
    except InvalidInputError as error:
        if os.environ.get("CHOROS_COMM") != MPI:
            raise
        place, refused = Place(), error
    signs = ", ".join(strange())
    if asks_mpi(place):
        return _ask(timeout, signs, refused)
    if signs:
        raise InvalidInputError(
            f"An MPI's launcher started this process ({signs}), and no variable that Choros knows tells which rank it "
            "is: all would train apart. Set CHOROS_COMM=mpi on all ranks, who then ask MPI; or unset "
            f"{', '.join(sign.partition('=')[0] for sign in strange())} to train on its own."
        )
    return place


def _ask(timeout: float, signs: str, refused: InvalidInputError | None) -> Place:
    from choros.comm.p2p import mpi_runtime

    found = mpi_runtime.place(timeout)
    if found["size"] == 1:
        if refused is not None:
            raise refused
        if signs:
            raise InvalidInputError(
                f"CHOROS_COMM=mpi asked MPI for this process's place, and it says rank 0 of 1, though {signs} tells "
                f"of a launcher: the ranks would train apart. {mpi_runtime.remedy()}"
            )
        print("choros: CHOROS_COMM=mpi is set, and MPI says that this process is alone", file=sys.stderr, flush=True)
        return Place()
    mpi_runtime.abort_on_exception(mpi_runtime.load_mpi())
    os.environ.update({f"CHOROS_MPI_{name.upper()}": str(value) for name, value in found.items()})
    return Place.here()
