"""Discovery of this process's rank: from its launcher's variables, or from MPI if ``CHOROS_COMM=mpi`` is set.

``Place.here()`` reads only the environment. The launcher of an unknown MPI may set no variable that Choros knows. MPI
itself knows the rank, but only after its start, and only ranks that communicate by MPI should start it. So this module
queries MPI only if ``CHOROS_COMM=mpi`` is set. It writes the result to the environment, where ``Place.here()`` reads
it.
"""

from __future__ import annotations

import logging
import os

from choros.cluster import Place, strange
from choros.comm.bootstrap.select import MPI, check_name
from choros.errors import InvalidInputError

logger = logging.getLogger(__name__)


def uses_mpi_rank(place: Place) -> bool:
    """Return whether the ranks will get their rank from MPI when they join.

    Args:
        place: Place. The result of ``Place.here()``.

    Example:
        >>> uses_mpi_rank(Place(0, 2, 0, 2, launcher="mpich"))
        False
    """
    return os.environ.get("CHOROS_COMM") == MPI and place.launcher == "single"


def find_place(timeout: float = 300.0) -> Place:
    """Return this process's place. Every rank of a job calls this before it joins the group.

    Args:
        timeout: float. Seconds that the start of MPI may last, if it is needed. Defaults to 300.

    Raises:
        InvalidInputError: ``CHOROS_COMM`` names nothing; the launcher's variables contradict each other; or an MPI
            launcher started this process and its rank is unknown, so each rank would train alone.

    Example:
        >>> find_place().rank
        0
    """
    check_name()
    contradiction: InvalidInputError | None = None
    try:
        place = Place.here()
    except InvalidInputError as error:
        if os.environ.get("CHOROS_COMM") != MPI:
            raise
        place, contradiction = Place(), error
    signs = ", ".join(strange())
    if uses_mpi_rank(place):
        return _place_from_mpi(timeout, signs, contradiction)
    if signs:
        raise InvalidInputError(
            f"An MPI launcher started this process ({signs}), and no variable that Choros knows has its rank: each "
            "rank would train a model of its own. Set CHOROS_COMM=mpi on all ranks to get the rank from MPI; or unset "
            f"{', '.join(sign.partition('=')[0] for sign in strange())} to train without other ranks."
        )
    return place


def _place_from_mpi(timeout: float, signs: str, contradiction: InvalidInputError | None) -> Place:
    from choros.comm.p2p import mpi_runtime

    numbers = mpi_runtime.place(timeout)
    if numbers["size"] == 1:
        if contradiction is not None:
            raise contradiction
        if signs:
            raise InvalidInputError(
                f"CHOROS_COMM=mpi is set, and MPI reports rank 0 of 1 for this process, though {signs} shows a "
                f"launcher: the ranks would train separate models. {mpi_runtime.remedy()}"
            )
        logger.warning(
            "CHOROS_COMM=mpi is set, and MPI reports a single process: there are no ranks that MPI could connect, and "
            "the workers of a Trainer on this machine exchange by shared memory. Start this script with mpiexec for "
            "ranks that exchange by MPI, or unset CHOROS_COMM."
        )
        return Place()
    mpi_runtime.abort_on_exception(mpi_runtime.load_mpi())
    os.environ.update({f"CHOROS_MPI_{name.upper()}": str(value) for name, value in numbers.items()})
    return Place.here()
