"""Launchers of a ``Trainer``'s workers outside of this machine: ssh, ``srun`` or an ``mpiexec``.

Each becomes a ``choros run`` of this process', which places the ranks, binds them, shows what they print and ends all
when one fails.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from choros.cluster import parse_slots
from choros.cluster.host_slots import is_this_machine
from choros.errors import InvalidInputError
from choros.launch.mpi.launcher import find_launcher
from choros.launch.process import exec_stub
from choros.launch.process.child_process import python_variables
from choros.launch.process.exec_stub import PARENT
from choros.launch.ssh.launcher import SSH

_GRACE = 15.0  # seconds that `choros run` may take to end its ranks


class LaunchedJob:
    """A ``choros run`` that is under way.

    Args:
        command: it.
        environ: its environment.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", exec_stub.__file__, *command],
            env={**environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is the caller's
            text=True,
            errors="replace",
        )
        self._reader: threading.Thread | None = None

    def read(self, line: Callable[[str], None]) -> None:
        """Give each line that it prints to ``line``, in a thread."""
        output = self._process.stdout
        assert output is not None  # noqa: S101 - a pipe, as asked

        def lines() -> None:
            for text in output:
                line(text.rstrip("\n"))
            output.close()

        self._reader = threading.Thread(target=lines, name="choros-output", daemon=True)
        self._reader.start()

    def code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, waited for so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience: float = 0.0) -> None:
        """End it, if it has not ended within ``patience`` seconds."""
        for number, seconds in ((0, patience), (signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
            if number:
                self._process.send_signal(number)
            if self.wait(seconds) is not None:
                break
        if self._reader is not None:
            self._reader.join(_GRACE)


class Launcher(Protocol):
    """Starts a Python module as the ranks of a job."""

    @property
    def here(self) -> bool:
        """True if some of the ranks run on this host."""
        ...

    def size(self) -> int | None:
        """Return the number of ranks that fit; None if it is not known."""
        ...

    def start(self, module: str, ranks: int, environ: Mapping[str, str], how: LaunchPreferences) -> LaunchedJob:
        """Start them, each with these variables too."""
        ...


@dataclass(frozen=True)
class LaunchPreferences:
    """The requirements of a ``Trainer`` for the launch of its ranks.

    Attributes:
        threads: int or None. Of each rank; its cores when None.
        bind: bool. Whether each rank is bound to cores of its own.
        network: str. The interface or domain by which the hosts reach each other; empty is the way to the others.
        echo: bool. Whether what the ranks print is shown here.
    """

    threads: int | None = None
    bind: bool = True
    network: str = ""
    echo: bool = True


class _Run:
    """One kind of ``choros run``."""

    hosts: str

    def __post_init__(self) -> None:
        if self.hosts:
            parse_slots(self.hosts)

    def size(self) -> int | None:
        """Return the number of ranks that fit, the slots of the hosts; None if no hosts were given."""
        return sum(count for _, count in parse_slots(self.hosts)) if self.hosts else None

    def start(self, module: str, ranks: int, environ: Mapping[str, str], how: LaunchPreferences) -> LaunchedJob:
        """Start the ranks."""
        words = [sys.executable, "-m", "choros", "run", "-n", str(ranks), *self.options()]
        words += ["--threads", str(how.threads)] if how.threads else []
        words += [] if how.bind else ["--no-bind"]
        words += ["--network", how.network] if how.network else []
        return LaunchedJob([*words, "-m", module], {**os.environ, **python_variables(), **environ})

    @property
    def here(self) -> bool:
        """True if some of the ranks are known to run on this host."""
        return any(is_this_machine(host) for host, _ in parse_slots(self.hosts)) if self.hosts else True

    def options(self) -> list[str]:
        """The options of ``choros run`` that make it this kind."""
        return ["-H", self.hosts] if self.hosts else []


@dataclass(frozen=True)
class Ssh(_Run):
    """Ranks on hosts that are reached by ssh without a password; one of them may be this one.

    All hosts have this directory, this Python and what it has installed.

    Args:
        hosts: str. ``"n1:2,n2:2"``: hosts, and how many ranks each may have.
        command: str. What starts a command on a host, with its options. Defaults to ``ssh -o BatchMode=yes``.

    Raises:
        InvalidInputError: hosts of another form.

    Example:
        >>> Ssh("n1:2,n2:2").size()
        4
    """

    hosts: str
    command: str = SSH

    def options(self) -> list[str]:
        """``-H``, and what starts a command there."""
        return [*super().options(), "--ssh", self.command]


@dataclass(frozen=True)
class Srun(_Run):
    """Ranks on the nodes of the SLURM allocation in which this process runs, one a task.

    Args:
        hosts: str. ``"n1:2,n2:2"`` to take these only. Defaults to the allocation's.

    Example:
        >>> Srun().options()
        ['--launcher', 'srun']
    """

    hosts: str = ""

    @property
    def here(self) -> bool:
        """The nodes of the allocation are meant, of which this may be none."""
        return False

    def size(self) -> int | None:
        """The slots of the hosts, else the tasks that the allocation was asked for."""
        told = os.environ.get("SLURM_NTASKS", "")
        return super().size() or (int(told) if told.isdecimal() else None)

    def start(self, module: str, ranks: int, environ: Mapping[str, str], how: LaunchPreferences) -> LaunchedJob:
        """Start the ranks, where there is a SLURM."""
        find_launcher("srun")
        return super().start(module, ranks, environ, how)

    def options(self) -> list[str]:
        """``--launcher``."""
        return ["--launcher", "srun", *super().options()]


@dataclass(frozen=True)
class Mpiexec(_Run):
    """Ranks that an ``mpiexec`` starts: Open MPI's, MPICH's, Intel MPI's or PALS'.

    Args:
        hosts: str. ``"n1:2,n2:2"``. Defaults to those that it finds itself: a scheduler's, or this one.
        program: str. Its path. Defaults to that of this environment, else the first on ``PATH``.

    Example:
        >>> Mpiexec("n1:2").options()
        ['--launcher', 'mpiexec', '-H', 'n1:2']
    """

    hosts: str = ""
    program: str = "mpiexec"

    def options(self) -> list[str]:
        """``--launcher``."""
        return ["--launcher", self.program, *super().options()]


# By name, so that a layer above this one can have a launcher: each is imported when it is asked for.
_NAMED = {"srun": f"{__name__}:Srun", "mpiexec": f"{__name__}:Mpiexec", "spark": "choros.spark.launcher:Spark"}


def launcher_of(given: Any) -> Launcher | None:
    """Return the launcher of the ranks: the given one, or the one that a name stands for, with its defaults.

    Raises:
        InvalidInputError: something else.
    """
    if given is None or (hasattr(given, "size") and (hasattr(given, "start") or hasattr(given, "executor"))):
        found: Launcher | None = given
        return found
    if isinstance(given, str) and given in _NAMED:
        module, name = _NAMED[given].split(":")
        made: Launcher = getattr(importlib.import_module(module), name)()
        return made
    raise InvalidInputError(
        f"launcher={given!r}: give choros.Ssh('n1:2,n2:2'), choros.Srun() (or 'srun'), choros.Mpiexec() (or "
        "'mpiexec') or choros.Spark() (or 'spark')."
    )
