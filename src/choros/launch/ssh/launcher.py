"""Launch of ranks on several hosts: an agent on each host, started by ssh, and a rendezvous of all ranks here."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from choros.cluster import Slots, is_this_machine
from choros.errors import InvalidInputError
from choros.launch.call_io import create
from choros.launch.local_job import LaunchOptions
from choros.launch.process.rank_output import Output
from choros.launch.process.rank_supervisor import JobResult
from choros.launch.process.rank_supervisor import run as run_hosts
from choros.launch.ssh.agent import carried

SSH = "ssh -o BatchMode=yes"
_LONGER = 3.0  # seconds that an agent may take to end after its ranks


def divide(size: int, slots: Slots) -> list[tuple[str, int]]:
    """Return the number of ranks of each host: fill the slots of the hosts in the order given.

    Raises:
        InvalidInputError: the hosts have fewer than ``size`` slots.

    Example:
        >>> divide(3, (("n1", 2), ("n2", 4)))
        [('n1', 2), ('n2', 1)]
    """
    chosen, remaining = [], size
    for host, count in slots:
        if remaining:
            chosen.append((host, min(count, remaining)))
            remaining -= min(count, remaining)
    if remaining:
        raise InvalidInputError(f"{size} ranks were asked for, but the hosts have {size - remaining} slots")
    return chosen


def start_on_hosts(
    command: Sequence[str],
    wish: LaunchOptions,
    slots: Slots,
    *,
    ssh: str = SSH,
    network: str = "",
    verbose: bool = False,
) -> JobResult:
    """Run a command as the ranks of a job on several hosts; see ``choros.launch.local_job.start``.

    All hosts need this working directory, this Python and its packages at the same paths. The ranks get the environment
    variables of this process. The secret with which the ranks authenticate goes through the agents' stdin, because
    command lines are visible to other users.

    Args:
        command: the program and its arguments.
        wish: the options of the launch.
        slots: the hosts and their slots (numbers of ranks).
        ssh: the program that starts a command on a host, and its options.
        network: the interface or domain by which the hosts reach each other; see
            ``choros.cluster.hardware.network_address``.
        verbose: print the cores, threads and command of each rank. Defaults to False.

    Returns:
        The outcome of the run; the code is that of the rank that failed first, on any host.

    Raises:
        InvalidInputError: the options cannot be satisfied; nothing was started.
    """
    from choros.cluster.hardware.network_address import head_address
    from choros.comm.bootstrap.rendezvous import Rendezvous
    from choros.comm.tcp.auth_socket import AuthListener

    hosts = divide(wish.size, slots)
    secret = secrets.token_bytes(32)
    memories: list[int] = []
    has_local = any(is_this_machine(host) for host, _ in hosts)
    with AuthListener(head_address(network, has_local), secret) as door:
        Rendezvous(door, wish.size)
        common = {"CHOROS_SECRET": secret.hex(), "CHOROS_MEETING": door.place, "CHOROS_NODES": str(len(hosts))}
        common |= {"CHOROS_HOSTS": ",".join(host for host, _ in hosts), "CHOROS_NETWORK": network}
        try:
            first = 0
            for node, (host, count) in enumerate(hosts):
                part: dict[str, Any] = {"total": wish.size, "first": first, "node": node, "nodes": len(hosts)}
                part["variables"] = {**common, "CHOROS_NODE": str(node)}
                instructions = told_agent(host, ssh, replace(wish, size=count), part, command, verbose)
                memories += [memory(json.dumps(instructions).encode()), memory(b"")]
                first += count
            pairs = list(zip(memories[::2], memories[1::2], strict=True))
            outcome = run_hosts(
                [sys.executable, "-m", "choros.launch.ssh.agent_client"],
                len(hosts),
                environment=[{"CHOROS_AGENT": f"{instructions_fd},{answer}"} for instructions_fd, answer in pairs],
                own_fds=pairs,
                grace=wish.grace + _LONGER,
                output=Output(len(hosts), marks=False),
                announce=False,
            )
            return _first(outcome, [answer for _, answer in pairs])
        finally:
            for fd in memories:
                os.close(fd)


def told_agent(
    host: str, ssh: str, wish: LaunchOptions, part: dict[str, Any], command: Sequence[str], verbose: bool = False
) -> dict[str, Any]:
    """Return the message to ``choros.launch.ssh.agent_client``: the agent's command line, and the job for the agent."""
    local = is_this_machine(host)
    return {
        "start": _agent() if local else [*shlex.split(ssh), host, shlex.join(_agent())],
        "host": "" if local else host,
        "cwd": os.getcwd(),
        "environ": {} if local else carried(),
        "note": secrets.token_hex(16),
        "wish": asdict(wish),
        "part": part,
        "command": list(command),
        "verbose": verbose,
    }


def _agent() -> list[str]:
    needed = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "KERAS_BACKEND") if os.environ.get(name)]
    return [*(["env", *needed] if needed else []), sys.executable, "-m", "choros.launch.ssh.agent"]


def memory(data: bytes) -> int:
    """Write bytes to anonymous memory; return its file descriptor."""
    fd = create("choros-agent")
    os.write(fd, data)
    return fd


def _first(outcome: JobResult, answers: Sequence[int]) -> JobResult:
    """Return the outcome with the code of the earliest failed rank, as the other failures may follow from it."""
    answers_read: list[dict[str, Any]] = [json.loads(text) for fd in answers if (text := os.pread(fd, 1 << 12, 0))]
    if outcome.signal or not answers_read:
        return outcome
    return replace(outcome, code=min(answers_read, key=lambda one: one["at"])["code"])
