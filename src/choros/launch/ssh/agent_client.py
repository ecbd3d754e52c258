"""The local process for one host of a job: it starts the agent there, over SSH or locally, and connects to its pipes.

``CHOROS_AGENT`` holds two file descriptors: of the ``AgentJob``, and of the memory for the time and code of its
first failed rank. On SIGTERM this process closes the agent's stdin, and the agent then ends its ranks. It forwards
SIGUSR1 and SIGUSR2 to the agent, for the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from choros.comm.messages import decode, header_of
from choros.console import LAUNCHER
from choros.launch.process.rank_supervisor import WARNINGS
from choros.launch.ssh.agent_job import AgentJob, FirstFailure

logger = logging.getLogger(LAUNCHER)

_SSH = 255  # ssh's exit code if ssh itself fails
_NO_PROGRAM = (126, 127)  # the codes of a shell that cannot start a program


def main() -> int:
    """Start the agent and wait for its end.

    Returns:
        The agent's exit code; 1 if no agent could be started.
    """
    job_fd, answer = (int(number) for number in os.environ.pop("CHOROS_AGENT").split(","))
    with os.fdopen(job_fd, "rb") as file:
        file.seek(0)
        header = json.load(file)
    job = decode(AgentJob, header)
    note = job.note.encode()
    agent = subprocess.Popen(job.start, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.stdin is not None and agent.stderr is not None  # noqa: S101, PT018 - Popen made pipes

    def stop(*_: Any) -> None:
        # In a thread: the signal may interrupt a write to this pipe, within which Python refuses to close it.
        threading.Thread(target=_close, args=(agent.stdin,), daemon=True).start()

    def warn(number: int, _: object) -> None:
        with suppress(OSError, ValueError):  # the agent has ended, or its stdin is closed
            os.write(agent.stdin.fileno(), b"%d\n" % number)  # type: ignore[union-attr]

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with suppress(BrokenPipeError):  # the agent has ended, and has printed the reason
        agent.stdin.write(json.dumps(header).encode() + b"\n")
        agent.stdin.flush()
    # Only now, because the first line on the agent's stdin must be the job.
    for number in WARNINGS:
        signal.signal(number, warn)
    has_failed = False  # whether the agent has reported a rank's failure, whose code may be any
    for line in agent.stderr:
        if line.startswith(note):
            has_failed = True
            failed = FirstFailure(time.monotonic_ns(), int(line[len(note) :]))
            os.pwrite(answer, json.dumps(header_of(failed)).encode(), 0)
            continue
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    code = agent.wait()
    if job.host and not has_failed and code in (_SSH, *_NO_PROGRAM):
        logger.warning(_remedy(job, code))
        return 1
    return code if code >= 0 else 128 - code


def _remedy(job: AgentJob, code: int) -> str:
    """Return the message for a host on which no agent could be started."""
    if code == _SSH:
        return (
            f"{job.host} could not be reached by ssh, whose message is above: correct its name in -H or the host file, "
            f"or make this command work: {shlex.join([*job.start[:-1], 'true'])}"
        )
    return f"{job.host} has no {sys.executable}, with which ranks start: install the same Python there, at that path"


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
