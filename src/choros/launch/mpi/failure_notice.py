"""The report of a rank's failure to the ``choros run`` process, over an authenticated socket.

Ranks that ``mpiexec`` or ``srun`` starts use it. ``CHOROS_HEAD`` holds the address and the secret.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from choros.cluster import Place
from choros.errors import ChorosError

HEAD = "CHOROS_HEAD"
_NOTICE = 5.0  # seconds for the report


def report_exit(code: int) -> None:
    """Report to ``choros run`` that this rank ends with a code.

    If the process cannot be reached, this does nothing, and the launcher's exit code is used.

    Args:
        code: int. The exit code, or 128 plus the number of a signal.
    """
    from choros.comm.tcp.auth_socket import dial

    head = json.loads(os.environ[HEAD])
    fact = {"rank": Place.here().rank, "code": code, "host": os.uname().nodename}
    with suppress(ChorosError, OSError):
        dial(head["place"], bytes.fromhex(head["secret"]), fact, _NOTICE).close()
