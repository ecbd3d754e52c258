"""The report of a rank's failure to the head process, under a foreign launcher: over an authenticated socket."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from choros.cluster import Place
from choros.errors import ChorosError

HEAD = "CHOROS_HEAD"
_NOTICE = 5.0  # seconds for telling


def tell(code: int) -> None:
    """Tell the head that this rank ends with a code; where it cannot be reached, the launcher's own is still something.

    Args:
        code: of the exit, or 128 and the number of a signal.
    """
    from choros.comm.tcp.auth_socket import dial

    head = json.loads(os.environ[HEAD])
    fact = {"rank": Place.here().rank, "code": code, "host": os.uname().nodename}
    with suppress(ChorosError, OSError):
        dial(head["place"], bytes.fromhex(head["secret"]), fact, _NOTICE).close()
