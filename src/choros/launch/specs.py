"""Launchers of a ``Trainer``'s workers on other hosts: ssh, ``srun`` or an ``mpiexec``.

Each starts ``choros run`` as a child process. This places and binds the ranks, shows their output, and ends all ranks
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

from choros.argument_checks import check_text
from choros.cluster import parse_slots
from choros.cluster.host_slots import is_this_machine
from choros.errors import InvalidInputError
from choros.launch.mpi.launcher import find_launcher
from choros.launch.process import exec_stub
from choros.launch.process.child_process import python_variables
from choros.launch.process.exec_stub import PARENT
from choros.launch.ssh.launcher import SSH

_END_SECONDS = 15.0  # seconds that `choros run` may take to end its ranks


class LaunchedJob:
    """A running ``choros run``.

    Args:
        command: the program and its arguments.
        environ: its environment variables.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            exec_stub.with_stub(command),
            env={**environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a separate session, so that Ctrl-C reaches the caller only
            text=True,
            errors="replace",
        )
        self._reader: threading.Thread | None = None

    def read(self, line: Callable[[str], None]) -> None:
        """Call ``line`` with each line of the output, in a thread."""
        output = self._process.stdout
        assert output is not None  # noqa: S101 - Popen made a pipe

        def lines() -> None:
            for text in output:
                line(text.rstrip("\n"))
            output.close()

        self._reader = threading.Thread(target=lines, name="choros-output", daemon=True)
        self._reader.start()

    def code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait at most ``seconds`` for the end; return the exit code, or None while it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for the end; if it still runs, send SIGTERM, and SIGKILL 15 s later."""
        for number, seconds in ((0, patience), (signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, _END_SECONDS)):
            if number:
                self._process.send_signal(number)
            if self.wait(seconds) is not None:
                break
        if self._reader is not None:
            self._reader.join(_END_SECONDS)


class Launcher(Protocol):
    """Interface of objects that start a Python module as the ranks of a job."""

    @property
    def here(self) -> bool:
        """True if some of the ranks run on this host."""
        ...

    def size(self) -> int | None:
        """Return the number of available slots; None if it is not known."""
        ...

    def start(self, module: str, ranks: int, environ: Mapping[str, str], preferences: LaunchPreferences) -> LaunchedJob:
        """Start ``module`` as ``ranks`` ranks, with ``environ`` added to their environment."""
        ...


@dataclass(frozen=True)
class LaunchPreferences:
    """The requirements of a ``Trainer`` for the launch of its ranks.

    Attributes:
        threads: int or None. Threads of each rank. Defaults to None, the number of its cores.
        bind: bool. Whether to bind each rank to separate cores. Defaults to True.
        network: str. The interface or domain by which the hosts reach each other. Defaults to "", the default route.
        echo: bool. Whether to show the output of the ranks here. Defaults to True.
        files: tuple of str. Files of this host that the ranks read by these paths. Launchers to hosts that share no
            directory copy them. Defaults to none.
    """

    threads: int | None = None
    bind: bool = True
    network: str = ""
    echo: bool = True
    files: tuple[str, ...] = ()


class _RunLauncher:
    """Base of launchers that start ``choros run``."""

    hosts: str

    def __post_init__(self) -> None:
        if self.hosts not in ("", None):
            parse_slots(self.hosts)

    def size(self) -> int | None:
        """Return the number of slots of the hosts; None if no hosts were given."""
        return sum(count for _, count in parse_slots(self.hosts)) if self.hosts else None

    def start(self, module: str, ranks: int, environ: Mapping[str, str], preferences: LaunchPreferences) -> LaunchedJob:
        """Start ``choros run`` with ``module`` as the command."""
        command = [sys.executable, "-m", "choros", "run", "-n", str(ranks), *self.options()]
        command += ["--threads", str(preferences.threads)] if preferences.threads else []
        command += [] if preferences.bind else ["--no-bind"]
        command += ["--network", preferences.network] if preferences.network else []
        return LaunchedJob([*command, "-m", module], {**os.environ, **python_variables(), **environ})

    @property
    def here(self) -> bool:
        """True if some of the ranks are known to run on this host."""
        return any(is_this_machine(host) for host, _ in parse_slots(self.hosts)) if self.hosts else True

    def options(self) -> list[str]:
        """Return the options of ``choros run`` for this launcher."""
        return ["-H", self.hosts] if self.hosts else []


@dataclass(frozen=True)
class Ssh(_RunLauncher):
    """Launcher by ssh without a password; the hosts may include this one.

    All hosts need this working directory, this Python and its packages at the same paths.

    Args:
        hosts: str. ``"n1:2,n2:2"``: hosts and their slots (numbers of ranks).
        command: str. The ssh program and its options. Defaults to ``ssh -o BatchMode=yes``.

    Raises:
        InvalidInputError: ``hosts`` has another form.

    Example:
        >>> Ssh("n1:2,n2:2").size()
        4
    """

    hosts: str
    command: str = SSH

    def __post_init__(self) -> None:
        check_text("hosts", self.hosts, "one text of the form host:slots, such as choros.Ssh('n1:2,n2:2')")
        check_text("command", self.command, "the ssh program and its options, such as 'ssh -p 2222'")
        super().__post_init__()

    def options(self) -> list[str]:
        """Return ``-H`` and ``--ssh`` with their values."""
        return [*super().options(), "--ssh", self.command]


@dataclass(frozen=True)
class Srun(_RunLauncher):
    """Launcher by ``srun`` on the nodes of the SLURM allocation of this process, one rank per task.

    Args:
        hosts: str. ``"n1:2,n2:2"``, to use these hosts only. Defaults to all hosts of the allocation.

    Example:
        >>> Srun().options()
        ['--launcher', 'srun']
    """

    hosts: str = ""

    @property
    def here(self) -> bool:
        """False, since this host need not be a node of the allocation."""
        return False

    def size(self) -> int | None:
        """Return the number of slots of the hosts, else ``SLURM_NTASKS``; None if both are missing."""
        tasks = os.environ.get("SLURM_NTASKS", "")
        return super().size() or (int(tasks) if tasks.isdecimal() else None)

    def start(self, module: str, ranks: int, environ: Mapping[str, str], preferences: LaunchPreferences) -> LaunchedJob:
        """Check that SLURM answers, then start ``choros run``."""
        find_launcher("srun")
        return super().start(module, ranks, environ, preferences)

    def options(self) -> list[str]:
        """Return ``--launcher srun``, and ``-H`` if hosts are given."""
        return ["--launcher", "srun", *super().options()]


@dataclass(frozen=True)
class Mpiexec(_RunLauncher):
    """Launcher by an ``mpiexec`` of Open MPI, MPICH, Intel MPI or PALS.

    Args:
        hosts: str. ``"n1:2,n2:2"``. Defaults to the hosts that mpiexec finds: a scheduler's, or this one.
        program: str. Name or path. Defaults to the ``mpiexec`` beside this Python, else the first on ``PATH``.

    Example:
        >>> Mpiexec("n1:2").options()
        ['--launcher', 'mpiexec', '-H', 'n1:2']
    """

    hosts: str = ""
    program: str = "mpiexec"

    def __post_init__(self) -> None:
        check_text("program", self.program, "a name or path, such as 'mpiexec'")
        super().__post_init__()

    def options(self) -> list[str]:
        """Return ``--launcher`` with the program, and ``-H`` if hosts are given."""
        return ["--launcher", self.program, *super().options()]


# Launchers by name, imported at use: choros.spark is a layer above this one.
_NAMED = {
    "srun": f"{__name__}:Srun",
    "mpiexec": f"{__name__}:Mpiexec",
    "ray": "choros.launch.ray_cluster.launcher:Ray",
    "spark": "choros.spark.launcher:Spark",
}


def launcher_of(given: Any) -> Launcher | None:
    """Return the given launcher, or the one of the given name with its defaults; None for None.

    Raises:
        InvalidInputError: ``given`` is something else.
    """
    if given is None or (hasattr(given, "size") and (hasattr(given, "start") or hasattr(given, "executor"))):
        launcher: Launcher | None = given
        return launcher
    if isinstance(given, str) and given in _NAMED:
        module, name = _NAMED[given].split(":")
        made: Launcher = getattr(importlib.import_module(module), name)()
        return made
    raise InvalidInputError(
        f"launcher={given!r}: give choros.Ssh('n1:2,n2:2'), choros.Srun() (or 'srun'), choros.Mpiexec() (or "
        "'mpiexec'), choros.Ray() (or 'ray') or choros.Spark() (or 'spark')."
    )
