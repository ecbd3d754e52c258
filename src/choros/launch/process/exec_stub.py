"""The first code in each process that Choros starts: bind the cores, and die with the parent.

As a script it is put before a command: ``python -I -S exec_stub.py COMMAND ARGS``. It calls ``settle``, then replaces
itself by the command, so that an interpreter has its cores before it imports anything. It imports only the standard
library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping, Sequence

CORES = "CHOROS_CORES"
PARENT = "CHOROS_PARENT"
_PR_SET_PDEATHSIG = 1


def settle(environ: MutableMapping[str, str] | None = None) -> None:
    """Bind this process to the cores in ``CHOROS_CORES``; make the kernel kill it when ``CHOROS_PARENT`` ends (Linux).

    Both variables are removed from the environment, so that children of this process do not act on them.

    Args:
        environ: mapping to read. Defaults to ``os.environ``.

    Raises:
        SystemExit: the parent has ended already, or the process cannot be bound to the cores.
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
        if os.getppid() != int(parent):  # the parent ended before prctl, so no signal will come
            raise SystemExit("choros: the process that started this one has ended")


def with_stub(command: Sequence[str]) -> list[str]:
    """Return a command that starts with this script, for ``CHOROS_CORES`` and ``CHOROS_PARENT``.

    Example:
        >>> with_stub(["python", "train.py"])[-2:]
        ['python', 'train.py']
    """
    return [sys.executable, "-I", "-S", __file__, *command]


def main(argv: list[str]) -> int:
    """Call ``settle``, then replace this process by the command.

    Args:
        argv: the command and its arguments.

    Returns:
        An exit code, only if the command cannot be run: 127 if it does not exist, else 126, as shells do.
    """
    settle()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"choros: cannot start {argv[0]}: {error.strerror}\n")  # no logging: it takes long to import
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
