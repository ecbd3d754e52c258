"""One host of a job, as ``choros run`` holds it: a process that speaks with the agent there, by ssh or here.

``CHOROS_AGENT`` holds two descriptors: what the agent is told, and the memory for when its first rank failed. SIGTERM
closes the agent's stdin, by which it ends its ranks; SIGUSR1 and SIGUSR2 are told it, for its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from choros.launch.process.rank_supervisor import WARNINGS

_SSH = 255  # its own failures


def main() -> int:
    """Start the agent and wait for its end.

    Returns:
        Its exit code.
    """
    told_at, answer = (int(each) for each in os.environ.pop("CHOROS_AGENT").split(","))
    with os.fdopen(told_at, "rb") as file:
        file.seek(0)
        told: dict[str, Any] = json.load(file)
    note = told["note"].encode()
    agent = subprocess.Popen(told.pop("start"), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.stdin is not None and agent.stderr is not None  # noqa: S101, PT018 - pipes, as asked

    def stop(*_: Any) -> None:
        threading.Thread(target=_close, args=(agent.stdin,), daemon=True).start()

    def warn(number: int, _: Any) -> None:
        with suppress(OSError, ValueError):  # it has ended, or is to
            os.write(agent.stdin.fileno(), b"%d\n" % number)  # type: ignore[union-attr]

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with suppress(BrokenPipeError):  # it has ended, and said why
        agent.stdin.write(json.dumps(told).encode() + b"\n")
        agent.stdin.flush()
    for number in WARNINGS:
        signal.signal(number, warn)
    for line in agent.stderr:
        if line.startswith(note):
            stamp = {"at": time.monotonic_ns(), "code": int(line[len(note) :])}
            os.pwrite(answer, json.dumps(stamp).encode(), 0)
            continue
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    code = agent.wait()
    if code == _SSH and told["host"]:
        print(f"choros run: {told['host']} could not be reached by ssh: see what it said above", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
