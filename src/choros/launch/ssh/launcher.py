"""Launch of ranks on several hosts: an agent on each host, started by ssh, and a rendezvous of all ranks here."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from choros.cluster import Slots, is_this_machine
from choros.comm.messages import decode, header_of
from choros.errors import InvalidInputError, counted
from choros.launch.call_io import create
from choros.launch.local_job import HostShare, LaunchOptions
from choros.launch.process.rank_limit import check_ranks
from choros.launch.process.rank_output import Output
from choros.launch.process.rank_supervisor import JobResult
from choros.launch.process.rank_supervisor import run as run_hosts
from choros.launch.ssh.agent_job import FirstFailure, agent_job

SSH = "ssh -o BatchMode=yes"
_AGENT_GRACE = 3.0  # seconds that an agent may take to end after its ranks


def check_ssh(ssh: str) -> None:
    """Check the command that runs a program on another host.

    Raises:
        InvalidInputError: its quotes are not closed, or its program is not on PATH.

    Example:
        >>> check_ssh("no-such-ssh -q")
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: there is no no-such-ssh on PATH, which starts ranks on other hosts: install \
it, or give --ssh COMMAND
    """
    try:
        program = (shlex.split(ssh) or [""])[0]
    except ValueError as error:
        raise InvalidInputError(f"--ssh {ssh!r} is not a valid command ({error}): close its quotes") from None
    if shutil.which(program) is None:
        raise InvalidInputError(
            f"there is no {program or 'program'} on PATH, which starts ranks on other hosts: install it, or give "
            "--ssh COMMAND"
        )


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
        raise InvalidInputError(f"{size} ranks were asked for, but the hosts have {counted(size - remaining, 'slot')}")
    return chosen


def start_on_hosts(
    command: Sequence[str],
    options: LaunchOptions,
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
        options: the options of the launch.
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
    from choros.comm.bootstrap.rendezvous import Rendezvous, RendezvousGreeting
    from choros.comm.tcp.auth_socket import AuthListener

    hosts = divide(options.size, slots)
    check_ranks(sum(count for host, count in hosts if is_this_machine(host)))
    secret = secrets.token_bytes(32)
    memories: list[int] = []
    has_local = any(is_this_machine(host) for host, _ in hosts)
    with AuthListener(head_address(network, has_local), secret, RendezvousGreeting) as listener:
        Rendezvous(listener, options.size)
        common = {"CHOROS_SECRET": secret.hex(), "CHOROS_MEETING": listener.address, "CHOROS_NODES": str(len(hosts))}
        common |= {"CHOROS_HOSTS": ",".join(host for host, _ in hosts), "CHOROS_NETWORK": network}
        try:
            first = 0
            for node, (host, count) in enumerate(hosts):
                part = HostShare(options.size, first, node, len(hosts), {**common, "CHOROS_NODE": str(node)})
                job = agent_job(host, ssh, replace(options, size=count), part, command, verbose=verbose)
                memories += [memory(json.dumps(header_of(job)).encode()), memory(b"")]
                first += count
            pairs = list(zip(memories[::2], memories[1::2], strict=True))
            outcome = run_hosts(
                [sys.executable, "-m", "choros.launch.ssh.agent_client"],
                len(hosts),
                environment=[{"CHOROS_AGENT": f"{job_fd},{answer}"} for job_fd, answer in pairs],
                own_fds=pairs,
                # The agents give their ranks ``options.grace`` seconds, so they themselves need more.
                grace=options.grace + _AGENT_GRACE,
                output=Output(len(hosts), marks=False),
                announce=False,
            )
            return _with_first_failure(outcome, [answer for _, answer in pairs])
        finally:
            for fd in memories:
                os.close(fd)


def memory(data: bytes) -> int:
    """Write bytes to anonymous memory; return its file descriptor."""
    fd = create("choros-agent")
    os.write(fd, data)
    return fd


def _with_first_failure(outcome: JobResult, answers: Sequence[int]) -> JobResult:
    """Return the outcome with the code of the earliest failed rank, as the other failures may follow from it."""
    texts = [text for fd in answers if (text := os.pread(fd, 1 << 12, 0))]
    failures = [decode(FirstFailure, json.loads(text)) for text in texts]
    if outcome.signal or not failures:
        return outcome
    return replace(outcome, code=min(failures, key=lambda failure: failure.at).code)
