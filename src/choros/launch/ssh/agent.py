"""The agent, which runs the ranks of one host of a job: ``python -m choros.launch.ssh.agent``.

``choros run`` starts one agent per host, over SSH, or directly on this host.

The first line on stdin is JSON with the command and its options. A later line holds the number of a signal, which the
agent sends to the ranks. When stdin closes, because the other end stops or has died, the agent ends the ranks. The
output of the ranks goes to stdout and stderr, marked with their ranks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from choros.cluster.hardware import raise_descriptors
from choros.console import LAUNCHER, write_line
from choros.errors import ChorosError
from choros.launch.local_job import HostShare, LaunchOptions, start
from choros.launch.process.child_process import ExitStatus

logger = logging.getLogger(LAUNCHER)

_AWAY = ("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TERM", "MAIL", "TMPDIR", "_", "SHLVL")
_FAMILIES = ("SSH_", "XDG_", "DBUS_", "DISPLAY", "BASH_FUNC", "SLURM_", "PMI_", "PMIX_", "OMPI_", "CHOROS_RUN")


def carried() -> dict[str, str]:
    """Return the environment variables that ranks on other hosts get too: all except those of this login and host.

    Example:
        >>> "HOME" in carried()
        False
    """
    return {k: v for k, v in os.environ.items() if k not in _AWAY and not k.startswith(_FAMILIES)}


def main() -> int:
    """Run the ranks.

    Returns:
        The exit code that ``choros run`` would return.
    """
    raise_descriptors()
    instructions: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    os.environ.update(instructions["environ"])

    def failed(ended: ExitStatus) -> None:
        write_line(f"{instructions['note']} {ended.code}", sys.stderr)

    def watch() -> None:
        for line in sys.stdin.buffer:  # a scheduler's warning, which the supervisor forwards
            os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)  # stdin is closed: the supervisor forwards the signal to the ranks

    try:
        os.chdir(instructions["cwd"])
    except OSError as error:
        where = os.uname().nodename
        logger.warning(f"{where} has no directory {instructions['cwd']} ({error.strerror})")
        return 1
    threading.Thread(target=watch, name="choros-watch", daemon=True).start()
    try:
        wish, part = LaunchOptions(**instructions["wish"]), HostShare(**instructions["part"], on_failure=failed)
        code = start(
            instructions["command"],
            wish,
            verbose=instructions["verbose"],
            part=part,
            announce=instructions.get("announce", True),
        ).code
    except ChorosError as error:
        logger.warning(f"{os.uname().nodename}: {error}")
        code = 2
    sys.stdout.flush()
    os._exit(code)  # os._exit, because the thread still blocks in a read


if __name__ == "__main__":
    sys.exit(main())
