"""The local process for one host of a job: it starts the agent there, over SSH or locally, and connects to its pipes.

``CHOROS_AGENT`` holds two file descriptors: of the ``AgentJob``, and of the memory for the time and code of its
first failed rank. On SIGTERM this process closes the agent's stdin, and the agent then ends its ranks. It forwards
SIGUSR1 and SIGUSR2 to the agent, for the ranks.
"""

from __future__ import annotations

import json
import logging
import os
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


def main() -> int:
    """Start the agent and wait for its end.

    Returns:
        Its exit code.
    """
    job_fd, answer = (int(number) for number in os.environ.pop("CHOROS_AGENT").split(","))
    with os.fdopen(job_fd, "rb") as file:
        file.seek(0)
        header = json.load(file)
    job = decode(AgentJob, header)
    note = job.note.encode()
    agent = subprocess.Popen(job.start, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.stdin is not None and agent.stderr is not None  # noqa: S101, PT018 - pipes, as asked

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
    for line in agent.stderr:
        if line.startswith(note):
            failed = FirstFailure(time.monotonic_ns(), int(line[len(note) :]))
            os.pwrite(answer, json.dumps(header_of(failed)).encode(), 0)
            continue
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    code = agent.wait()
    if code == _SSH and job.host:
        logger.warning(f"{job.host} could not be reached by ssh: see its output above")
    return code if code >= 0 else 128 - code


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
