"""Ranks on several hosts: an agent on each, started by ssh, and a meeting here, at which all learn of each other."""

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
_LONGER = 3.0  # seconds that a host may take to end, after its ranks


def divide(size: int, slots: Slots) -> list[tuple[str, int]]:
    """Return the number of ranks for each host: its slots, in the order given, until there are enough.

    Example:
        >>> divide(3, (("n1", 2), ("n2", 4)))
        [('n1', 2), ('n2', 1)]
    """
    found, left = [], size
    for host, count in slots:
        if left:
            found.append((host, min(count, left)))
            left -= min(count, left)
    if left:
        raise InvalidInputError(f"{size} ranks were asked for, but the hosts have {size - left} slots")
    return found


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

    All hosts have this directory, this Python and what it has installed. The variables of this process go along. The
    secret by which the ranks know each other goes through the agents' stdin, not their command lines.

    Args:
        command: the program and its arguments.
        wish: how.
        slots: the hosts, and how many ranks each may have.
        ssh: the program that starts a command on a host, and its options.
        network: the interface or domain by which the hosts reach each other; see
            ``choros.cluster.hardware.network_address``.
        verbose: say what each rank gets.

    Returns:
        What has become of the run; the code is that of the rank that failed first, on whichever host.

    Raises:
        InvalidInputError: a wish that cannot be met; nothing was started.
    """
    from choros.cluster.hardware.network_address import head_address
    from choros.comm.bootstrap.rendezvous import Rendezvous
    from choros.comm.tcp.auth_socket import AuthListener

    hosts = divide(wish.size, slots)
    secret = secrets.token_bytes(32)
    memories: list[int] = []
    here = any(is_this_machine(host) for host, _ in hosts)
    with AuthListener(head_address(network, here), secret) as door:
        Rendezvous(door, wish.size)
        common = {"CHOROS_SECRET": secret.hex(), "CHOROS_MEETING": door.place, "CHOROS_NODES": str(len(hosts))}
        common |= {"CHOROS_HOSTS": ",".join(host for host, _ in hosts), "CHOROS_NETWORK": network}
        try:
            first = 0
            for node, (host, count) in enumerate(hosts):
                part: dict[str, Any] = {"total": wish.size, "first": first, "node": node, "nodes": len(hosts)}
                part["variables"] = {**common, "CHOROS_NODE": str(node)}
                told = told_agent(host, ssh, replace(wish, size=count), part, command, verbose)
                memories += [memory(json.dumps(told).encode()), memory(b"")]
                first += count
            pairs = list(zip(memories[::2], memories[1::2], strict=True))
            outcome = run_hosts(
                [sys.executable, "-m", "choros.launch.ssh.agent_client"],
                len(hosts),
                environment=[{"CHOROS_AGENT": f"{told},{answer}"} for told, answer in pairs],
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
    """Return the message to ``choros.launch.ssh.agent_client``: how to start an agent, and what the agent runs."""
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
    """Bytes in memory without a name, as a descriptor that a process can inherit."""
    fd = create("choros-agent")
    os.write(fd, data)
    return fd


def _first(outcome: JobResult, answers: Sequence[int]) -> JobResult:
    """The failure that was told first, where one was: the others may have followed from it."""
    told: list[dict[str, Any]] = [json.loads(text) for fd in answers if (text := os.pread(fd, 1 << 12, 0))]
    if outcome.signal or not told:
        return outcome
    return replace(outcome, code=min(told, key=lambda one: one["at"])["code"])
