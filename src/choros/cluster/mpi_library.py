"""The MPI library in this process: one start with a time limit, the end at exit of Python, and its name for messages.

This module, ``comm/p2p/mpi_runtime.py`` and ``comm/p2p/mpi_group.py`` alone use mpi4py. It is imported at first use.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from choros.errors import InvalidInputError

_NAME_BYTES = 255  # the length of the longest host name in DNS


def load_mpi() -> ModuleType:
    """Return ``mpi4py.MPI`` without a start of MPI, unless the script has started it.

    Raises:
        InvalidInputError: mpi4py is not installed, or it finds no MPI library.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        with warnings.catch_warnings():  # ``start`` refuses a launcher that does not fit, with a better message
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        by_tcp = ""
        if find_spec("mpi4py") is None and not os.environ.get("CHOROS_COMM"):  # then a secret selects TCP
            by_tcp = (
                " Without MPI the ranks connect by TCP: set CHOROS_SECRET to the same 64 random hexadecimal digits on "
                "all of them (openssl rand -hex 32)."
            )
        raise InvalidInputError(
            "The ranks were started by an MPI launcher, or CHOROS_COMM=mpi is set, but mpi4py with an MPI library is "
            f"missing ({error}): pip install 'choros[mpi]' to use this machine's own MPI, or 'choros[mpi-wheel]', "
            f"which brings MPICH.{by_tcp}"
        ) from None
    except RuntimeError as error:  # mpi4py raises this if it can load no MPI library
        raise InvalidInputError(
            f"mpi4py is installed but finds no MPI library ({error}): load your site's MPI module, or "
            "pip install 'choros[mpi-wheel]', which brings MPICH."
        ) from None
    return MPI


def start(timeout: float) -> ModuleType:
    """Start MPI if it is not started; return ``mpi4py.MPI``.

    Args:
        timeout: float. Seconds for the start, which waits for all ranks; after that this process is ended.

    Raises:
        InvalidInputError: mpi4py is missing, the launcher belongs to another MPI, or MPI was ended in this process.
    """
    MPI = load_mpi()
    if MPI.Is_finalized():
        raise InvalidInputError("MPI was ended in this process (MPI.Finalize) and cannot be started again.")
    if not MPI.Is_initialized():
        version = MPI.Get_library_version()
        if "PMIX_RANK" in os.environ and "MPICH" in version and "pmix" not in version.lower():
            raise InvalidInputError(
                f"{local_name()}: the launcher uses PMIx, which mpi4py's {library_name(MPI)} does not support. "
                f"{remedy()}"
            )
        waiting_for_all_ranks_inside_mpi(timeout, MPI.Init_thread)
        # Python runs exit functions in reverse order. Groups register later than this, so they end before MPI.
        atexit.register(_finish, MPI, timeout)
    return MPI


def gather_names(name: str, timeout: float) -> tuple[int, list[str]]:
    """Return this rank and the names that all ranks pass, in the order of ranks. All ranks call.

    Args:
        name: the name of this rank's host.
        timeout: float. Seconds for the start of MPI, and again for the exchange.

    Raises:
        InvalidInputError: as ``start``, or the name is longer than 255 bytes.
    """
    sent = name.encode()
    if len(sent) > _NAME_BYTES:
        raise InvalidInputError(f"the name {name[:40]!r}... has more than {_NAME_BYTES} bytes: shorten it.")
    world = start(timeout).COMM_WORLD
    received = bytearray(world.Get_size() * _NAME_BYTES)
    buffer = bytearray(sent.ljust(_NAME_BYTES, b"\0"))  # equal lengths, so that one Allgather is enough
    waiting_for_all_ranks_inside_mpi(timeout, lambda: world.Allgather(buffer, received))
    pieces = (received[at : at + _NAME_BYTES] for at in range(0, len(received), _NAME_BYTES))
    return int(world.Get_rank()), [piece.rstrip(b"\0").decode() for piece in pieces]


def _finish(MPI: ModuleType, timeout: float) -> None:
    if not MPI.Is_finalized():
        waiting_for_all_ranks_inside_mpi(timeout, MPI.Finalize)


def waiting_for_all_ranks_inside_mpi(timeout: float, call: Callable[[], object]) -> None:
    """Start or end MPI, which waits for all ranks; end this process after ``timeout`` seconds.

    mpi4py holds Python's global lock during the call, so no Python thread could watch the clock. faulthandler watches
    it from C and prints the Python stack. The stack shows this function's name, so the name explains the hang.

    Example:
        >>> waiting_for_all_ranks_inside_mpi(5.0, lambda: None)
    """
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def local_name() -> str:
    """Return this process's rank and host for messages, with the rank from the launcher's variables or "?"."""
    rank = next((os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if k in os.environ), "?")
    return f"rank {rank} on {os.uname().nodename}"


def library_name(MPI: ModuleType) -> str:
    """Return the MPI library's name and version, such as ``MPICH 5.0.2``."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def remedy() -> str:
    """Return advice how to start the ranks so that launcher and library fit."""
    local_mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    launcher = f"{local_mpiexec}, which" if local_mpiexec.exists() else "the mpiexec that"
    return (
        f"Start the ranks with {launcher} belongs to {library_name(load_mpi())}, under SLURM with srun --mpi=pmix "
        "(Open MPI) or --mpi=pmi2 (MPICH), or install mpi4py for the MPI of your launcher."
    )
