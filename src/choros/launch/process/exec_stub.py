"""The first thing that runs in a process that Choros starts: cores, and to die with the parent.

As a script it is put before a command: ``python -I -S start.py COMMAND ARGS``. It settles, then becomes the command,
so that an interpreter has its cores before it imports anything. Standard library only; imports nothing of Choros.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping

CORES = "CHOROS_CORES"
PARENT = "CHOROS_PARENT"
_PR_SET_PDEATHSIG = 1


def settle(environ: MutableMapping[str, str] | None = None) -> None:
    """Bind this process to the cores in ``CHOROS_CORES`` and have the kernel end it when ``CHOROS_PARENT`` ends.

    Both variables are taken out of the environment, so that this process's own children do not act on them.

    Args:
        environ: what to read instead of ``os.environ``.

    Raises:
        SystemExit: the parent has ended already, or the cores cannot be had.
    """
    environ = os.environ if environ is None else environ
    cores = environ.pop(CORES, "")
    parent = environ.pop(PARENT, "")
    if cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (OSError, ValueError) as error:
            raise SystemExit(f"choros: cannot bind to the cores {cores}: {error}") from None
    if parent:
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            raise SystemExit("choros: the process that started this one has ended")


def main(argv: list[str]) -> int:
    """Settle, then become the command.

    Args:
        argv: the command and its arguments.

    Returns:
        Only where the command cannot be run: 127 when there is none of that name, else 126, as shells do.
    """
    settle()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"choros: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
