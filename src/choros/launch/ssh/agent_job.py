"""The job of one host's agent, in the encoding of ``choros.comm.messages``."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from choros.cluster import is_this_machine
from choros.launch.local_job import HostShare, LaunchOptions

# Variables that belong to this login, and beginnings of those that belong to this host.
_LOGIN_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TERM", "MAIL", "TMPDIR", "_", "SHLVL"),
)
OF_LAUNCHER = ("SLURM_", "PMI_", "PMIX_", "OMPI_")  # a scheduler's launcher, which may have started this process
_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_", "DISPLAY", "BASH_FUNC", *OF_LAUNCHER, "CHOROS_RUN")


@dataclass(frozen=True)
class AgentJob:
    """The job of an agent.

    Attributes:
        start: the command that starts the agent, on this host or by ssh.
        host: the name of the other host; "" for this one.
        directory: the working directory of the ranks.
        environ: environment variables that the agent sets.
        note: a random text that begins the line by which the agent reports its first failed rank.
        options: the options of the launch.
        part: the ranks on this host.
        command: the program and its arguments.
        verbose: print the cores, threads and command of each rank.
        announce: print which rank failed.
    """

    start: list[str]
    host: str
    directory: str
    environ: dict[str, str]
    note: str
    options: LaunchOptions
    part: HostShare
    command: list[str]
    verbose: bool = False
    announce: bool = True


@dataclass(frozen=True)
class FirstFailure:
    """The time, in nanoseconds of a monotonic clock, and the exit code of a host's first failed rank."""

    at: int
    code: int


def agent_job(
    host: str,
    ssh: str,
    options: LaunchOptions,
    part: HostShare,
    command: Sequence[str],
    *,
    verbose: bool = False,
    announce: bool = True,
) -> AgentJob:
    """Return the job of the agent of a host; for the arguments see ``AgentJob``, and ``start_on_hosts`` for ``ssh``."""
    local = is_this_machine(host)
    needed = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "KERAS_BACKEND") if os.environ.get(name)]
    agent = [*(["env", *needed] if needed else []), sys.executable, "-m", "choros.launch.ssh.agent"]
    return AgentJob(
        start=agent if local else [*shlex.split(ssh), host, shlex.join(agent)],
        host="" if local else host,
        directory=os.getcwd(),
        environ={} if local else carried(),
        note=secrets.token_hex(16),
        options=options,
        part=part,
        command=list(command),
        verbose=verbose,
        announce=announce,
    )


def carried() -> dict[str, str]:
    """Return the environment variables that ranks on other hosts get too: all except those of this login and host.

    Example:
        >>> "HOME" in carried()
        False
    """
    return {k: v for k, v in os.environ.items() if k not in _LOGIN_VARIABLES and not k.startswith(_HOST_PREFIXES)}
