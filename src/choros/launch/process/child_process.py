"""One child process: process group, exit status, peak memory; with a pidfd on Linux."""

from __future__ import annotations

import contextlib
import importlib
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
    """The exit status of a process.

    Attributes:
        exit: int. The exit code; -1 if a signal ended the process.
        signal: str. The name of the signal that ended it, else ``""``.
        code: int. The code as a shell gives it: the exit code, or 128 plus the number of the signal.
        peak_memory: int. Bytes; 0 if unknown.
    """

    exit: int
    signal: str
    code: int
    peak_memory: int


class Child:
    """A process in a separate session, so that Ctrl-C in the terminal does not reach it.

    The session gives it a process group of the same number, to which signals are sent.

    Create it in a thread that outlives it: on Linux the kernel kills the process when the creating thread ends.

    Args:
        argv: the program and its arguments.
        environment: its whole environment.
        cores: the logical cores to which ``choros.launch.process.exec_stub`` binds it. Defaults to none.
        pass_fds: file descriptors that it inherits under the same numbers.
        stdout, stderr: file descriptors for its output.
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
        self._memory_before = peak_memory()  # the child's ru_maxrss begins at this value
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
        # Some kernels and sandboxes have no pidfd. The supervisors then call ``check`` at short intervals.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)
        self._peak = 0
        self._ended: ExitStatus | None = None

    def sample(self) -> None:
        """Record the peak memory so far."""
        if self._ended is None:
            self._peak = max(self._peak, peak_memory(self.pid))

    @property
    def peak_memory(self) -> int:
        """The peak memory of the samples, in bytes; 0 if unknown."""
        return self._peak

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process (SIGSTOP), where ``/proc`` shows it."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
        return False

    def send_signal(self, number: int, process_only: bool = False) -> None:
        """Send a signal to the process group; do nothing if the process has ended.

        Args:
            number: the number of the signal.
            process_only: send it to the process only. Its children would end by a SIGUSR1. Defaults to False.
        """
        with self._lock:
            if self._ended is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.kill if process_only else os.killpg)(self.pid, number)

    def check(self) -> ExitStatus | None:
        """Return the exit status, or None while it runs; after its end kill its process group and reap it."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            try:
                if hasattr(os, "waitid"):
                    if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        return None
                    self._kill_group()  # before reaping: until then no other process gets its pid
                    _, status, usage = os.wait4(self.pid, 0)
                else:  # macOS
                    reaped, status, usage = os.wait4(self.pid, os.WNOHANG)
                    if reaped == 0:
                        return None
                    self._kill_group()
            except ChildProcessError:  # another os.wait() in this process reaped it
                return self._record_end(ExitStatus(-1, "", 1, self._peak))
            reported = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            # If the child used less memory than this process had, ru_maxrss is that of this process. Then only samples
            # count.
            peak = max(self._peak, reported) if reported > self._memory_before * 1.02 else self._peak
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return self._record_end(ExitStatus(-1, _name(-code), 128 - code, peak))
            return self._record_end(ExitStatus(code, "", code, peak))

    def wait(self, seconds: float) -> ExitStatus | None:
        """Repeat ``check`` for at most ``seconds``; return the exit status, or None while it runs."""
        limit = time.monotonic() + seconds
        pause = 0.001
        while (ended := self.check()) is None and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(0.02, pause * 2)
        return ended

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _record_end(self, ended: ExitStatus) -> ExitStatus:
        self._ended = ended
        self._process.returncode = ended.exit  # so that subprocess neither waits for it nor warns
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return ended


def python_variables() -> dict[str, str]:
    """Return variables for an interpreter with this one's module path, unbuffered output and ``faulthandler``.

    Example:
        >>> python_variables()["PYTHONUNBUFFERED"]
        '1'
    """
    return {"PYTHONPATH": os.pathsep.join(module_path()), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def module_path() -> list[str]:
    """Return ``sys.path`` for another process: with the working directory by its name.

    Example:
        >>> "" in module_path()
        False
    """
    return [entry or os.getcwd() for entry in sys.path if os.pathsep not in entry]


def set_module_path(path: Sequence[str]) -> None:
    """Search modules as another process does: first its ``module_path``, then entries that only this process has.

    Args:
        path: the other process's ``module_path``. It may have grown since this process started.
    """
    merged = [*path, *(entry for entry in sys.path if entry not in set(path))]
    if merged != sys.path:
        sys.path[:] = merged
        importlib.invalidate_caches()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
