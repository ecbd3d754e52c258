"""Ranks as real processes: each runs a script with the descriptor of a segment, and is gone when the test ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

PRELUDE = """
import json, os, signal, sys, time
import numpy as np
from choros.errors import ChorosError
from choros.transport.segment import Segment
from choros.transport.shared_centre import SharedCentre
from choros.transport.shared_group import SharedGroup, share
from choros.transport import board
fd, rank, size = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def say(**facts):
    print(json.dumps(facts), flush=True)

def trying(call):
    begin = time.perf_counter()
    try:
        call()
    except ChorosError as error:
        say(error=type(error).__name__, text=str(error), seconds=time.perf_counter() - begin,
            missing=list(getattr(error, "missing", ())))
    else:
        say(error=None, seconds=time.perf_counter() - begin)
"""


class Ranks:
    """A set of running ranks of one script."""

    def __init__(self):
        self.processes = []

    def start(self, script, segment, size, ranks=None, prelude=PRELUDE):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for rank in range(size) if ranks is None else ranks:
            fds = [segment.fd] if segment is not None else []
            process = subprocess.Popen(
                [sys.executable, "-c", prelude + script, str(fds[0] if fds else -1), str(rank), str(size)],
                pass_fds=fds,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self.processes.append(process)
        return self

    def line(self, rank):
        """The next line that a rank says."""
        line = self.processes[rank].stdout.readline()
        assert line, f"rank {rank} said nothing: {self.processes[rank].stderr.read()}"
        return json.loads(line)

    def kill(self, rank, number=signal.SIGKILL):
        self.processes[rank].send_signal(number)

    def finish(self, within=60.0, codes=None):
        """Each rank's remaining lines, once all have ended with the expected codes."""
        end = time.monotonic() + within
        said = []
        for rank, process in enumerate(self.processes):
            process.wait(timeout=max(end - time.monotonic(), 0.1))
            out, errors = process.stdout.read(), process.stderr.read()
            expected = (codes or {}).get(rank, 0)
            assert process.returncode == expected, f"rank {rank} ended with {process.returncode}:\n{errors}"
            said.append([json.loads(line) for line in out.splitlines()])
        return said

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


@pytest.fixture
def ranks():
    running = Ranks()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def leaves_nothing():
    """No descriptor of this process and no name in /dev/shm is left by a test."""
    shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        after = set(os.listdir("/proc/self/fd"))
        assert not [fd for fd in after - before if _is_memory(fd)], "a segment's descriptor was left open"
    if os.path.isdir("/dev/shm"):
        assert not [name for name in set(os.listdir("/dev/shm")) - shm if "choros" in name]


def _is_memory(fd):
    try:
        return "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
