"""The agent, which runs the ranks of one host of a job: ``python -m choros.launch.ssh.agent``.

``choros run`` starts one agent per host, over SSH, or directly on this host.

The first line on stdin is an ``AgentJob`` in JSON. A later line holds the number of a signal, which the
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

from choros.cluster.hardware import raise_descriptors
from choros.comm.messages import decode
from choros.console import LAUNCHER, write_line
from choros.errors import ChorosError
from choros.launch.local_job import start
from choros.launch.process.child_process import ExitStatus
from choros.launch.ssh.agent_job import AgentJob

logger = logging.getLogger(LAUNCHER)


def main() -> int:
    """Run the ranks.

    Returns:
        The exit code that ``choros run`` would return.
    """
    raise_descriptors()
    job = decode(AgentJob, json.loads(sys.stdin.buffer.readline()))
    os.environ.update(job.environ)

    def failed(ended: ExitStatus) -> None:
        write_line(f"{job.note} {ended.code}", sys.stderr)

    def watch() -> None:
        for line in sys.stdin.buffer:  # a scheduler's warning, which the supervisor forwards
            os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)  # stdin is closed: the supervisor forwards the signal to the ranks

    try:
        os.chdir(job.directory)
    except OSError as error:
        where = os.uname().nodename
        logger.warning(f"{where} has no directory {job.directory} ({error.strerror})")
        return 1
    threading.Thread(target=watch, name="choros-watch", daemon=True).start()
    try:
        outcome = start(
            job.command, job.options, verbose=job.verbose, part=job.part, announce=job.announce, on_failure=failed
        )
        code = outcome.code
    except ChorosError as error:
        logger.warning(f"{os.uname().nodename}: {error}")
        code = 2
    sys.stdout.flush()
    os._exit(code)  # os._exit, because the thread still blocks in a read


if __name__ == "__main__":
    sys.exit(main())
