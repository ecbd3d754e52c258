"""The report of a rank's failure to the ``choros run`` process, over an authenticated socket.

Ranks that ``mpiexec`` or ``srun`` starts use it. ``CHOROS_HEAD`` holds a ``RunAddress``.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass

from choros.cluster import Place
from choros.comm.messages import decode
from choros.errors import ChorosError

HEAD = "CHOROS_HEAD"
_REPORT_SECONDS = 5.0  # seconds for the report


@dataclass(frozen=True)
class RunAddress:
    """The address of the ``choros run`` process and the settings of a rank, as a message in ``CHOROS_HEAD``.

    Attributes:
        place: str. ``address:port`` of its listener for ``RankExit``.
        secret: str. The secret of the listener in hex.
        bind: bool. Whether to bind the rank to separate cores.
        threads: int or None. The number of threads of the rank.
    """

    place: str
    secret: str
    bind: bool
    threads: int | None

    @classmethod
    def read(cls) -> RunAddress:
        """Return the message in this process's environment."""
        return decode(cls, json.loads(os.environ[HEAD]))


@dataclass(frozen=True)
class RankExit:
    """A rank has ended. ``code``: its exit code, or 128 plus the number of a signal. ``host``: the name of its host."""

    rank: int
    code: int
    host: str


def report_exit(code: int) -> None:
    """Report to ``choros run`` that this rank ends with a code.

    If the process cannot be reached, this does nothing, and the launcher's exit code is used.

    Args:
        code: int. The exit code, or 128 plus the number of a signal.
    """
    from choros.comm.tcp.auth_socket import dial

    run_address = RunAddress.read()
    report = RankExit(Place.here().rank, code, os.uname().nodename)
    with suppress(ChorosError, OSError):
        dial(run_address.place, bytes.fromhex(run_address.secret), report, _REPORT_SECONDS).close()
