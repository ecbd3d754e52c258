"""The ranks of one host of a job: ``python -m choros.launch.ssh.agent``.

``choros run`` starts it there, over SSH or on this machine.

One line of JSON on stdin tells what to do; a line with the number of a signal is a warning for the ranks. When stdin
closes, because the other end was told to stop or has died, the ranks are ended. The lines of the ranks go to stdout and
stderr, marked with their ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from choros.cluster.hardware import raise_descriptors
from choros.errors import ChorosError
from choros.launch.local_job import HostShare, LaunchOptions, start
from choros.launch.process.child_process import ExitStatus

_AWAY = ("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TERM", "MAIL", "TMPDIR", "_", "SHLVL")
_FAMILIES = ("SSH_", "XDG_", "DBUS_", "DISPLAY", "BASH_FUNC", "SLURM_", "PMI_", "PMIX_", "OMPI_", "CHOROS_RUN")


def carried() -> dict[str, str]:
    """The variables of this process that ranks on other hosts get too: all but those of this login and this host.

    Example:
        >>> "HOME" in carried()
        False
    """
    return {k: v for k, v in os.environ.items() if k not in _AWAY and not k.startswith(_FAMILIES)}


def main() -> int:
    """Run the ranks.

    Returns:
        What ``choros run`` would.
    """
    raise_descriptors()
    told: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    os.environ.update(told["environ"])

    def failed(ended: ExitStatus) -> None:
        print(f"{told['note']} {ended.code}", file=sys.stderr, flush=True)

    def watch() -> None:
        for line in sys.stdin.buffer:  # a scheduler's warning, to be handed on
            os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)  # which the engine hands to the ranks

    try:
        os.chdir(told["cwd"])
    except OSError as error:
        where = os.uname().nodename
        print(f"choros run: {where} has not the directory {told['cwd']} ({error.strerror})", file=sys.stderr)
        return 1
    threading.Thread(target=watch, name="choros-watch", daemon=True).start()
    try:
        wish, part = LaunchOptions(**told["wish"]), HostShare(**told["part"], on_failure=failed)
        code = start(
            told["command"], wish, verbose=told["verbose"], part=part, announce=told.get("announce", True)
        ).code
    except ChorosError as error:
        print(f"choros run: {os.uname().nodename}: {error}", file=sys.stderr, flush=True)
        code = 2
    sys.stdout.flush()
    os._exit(code)  # the thread still reads


if __name__ == "__main__":
    sys.exit(main())
