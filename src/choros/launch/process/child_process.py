"""One process that Choros started: its group, its end, its peak memory. Linux's pidfd where there is one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from choros.cluster.hardware.peak_memory import peak_memory
from choros.launch.process.exec_stub import CORES, PARENT


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process.

    Attributes:
        exit: int. What it exited with; -1 where a signal ended it.
        signal: str. The signal's name, ``""`` where none ended it.
        code: int. As a shell gives it: the exit code, or 128 and the signal's number.
        peak_memory: int. Bytes; 0 where unknown.
    """

    exit: int
    signal: str
    code: int
    peak_memory: int


class Child:
    """A process with a session of its own, so that Ctrl-C in the terminal does not reach it.

    To be made in a thread that outlives it: the kernel ends the process when that thread ends.

    Args:
        argv: the command.
        environment: its whole environment.
        cores: the logical cores that ``choros.launch.process.exec_stub`` binds it to; empty for none.
        pass_fds: descriptors that it inherits under the same numbers.
        stdout, stderr: descriptors for its output.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        cores: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
        stdout: int,
        stderr: int,
    ) -> None:
        extra = {PARENT: str(os.getpid())}
        if cores:
            extra[CORES] = ",".join(str(core) for core in cores)
        self._lock = threading.RLock()
        self._before = peak_memory()  # ru_maxrss of the child starts from what this process had
        self._process = subprocess.Popen(
            list(argv),
            env={**environment, **extra},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.pidfd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)
        self._peak = 0
        self._ended: ExitStatus | None = None

    def sample(self) -> None:
        """Note the peak memory up to now."""
        if self._ended is None:
            self._peak = max(self._peak, peak_memory(self.pid))

    def send_signal(self, number: int, alone: bool = False) -> None:
        """Signal the process and whatever it has started in its session's group; nothing when it has ended.

        Args:
            number: of the signal.
            alone: only the process itself, as what it started would end by a warning.
        """
        with self._lock:
            if self._ended is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.kill if alone else os.killpg)(self.pid, number)

    def check(self) -> ExitStatus | None:
        """Return how it ended, or None while it runs. Kill what it left in its process group, and reap it."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            try:
                if hasattr(os, "waitid"):
                    if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        return None
                    self._sweep()  # before it is reaped, its number is nobody else's
                    _, status, usage = os.wait4(self.pid, 0)
                else:  # macOS
                    reaped, status, usage = os.wait4(self.pid, os.WNOHANG)
                    if reaped == 0:
                        return None
                    self._sweep()
            except ChildProcessError:  # somebody else's os.wait() took it
                return self._end(ExitStatus(-1, "", 1, self._peak))
            most = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            peak = max(self._peak, most) if most > self._before * 1.02 else self._peak
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return self._end(ExitStatus(-1, _name(-code), 128 - code, peak))
            return self._end(ExitStatus(code, "", code, peak))

    def wait(self, seconds: float) -> ExitStatus | None:
        """``check``, repeated for so long."""
        limit = time.monotonic() + seconds
        pause = 0.001
        while (ended := self.check()) is None and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(0.02, pause * 2)
        return ended

    def _sweep(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _end(self, ended: ExitStatus) -> ExitStatus:
        self._ended = ended
        self._process.returncode = ended.exit  # so that subprocess neither waits for it nor warns
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return ended


def python_variables() -> dict[str, str]:
    """Variables for an interpreter that finds the modules that this one finds, and does not hold back what it prints.

    Example:
        >>> python_variables()["PYTHONUNBUFFERED"]
        '1'
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if os.pathsep not in entry)
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
