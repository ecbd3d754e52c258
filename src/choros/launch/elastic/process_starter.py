"""Preparation of a process of an elastic job, on this host or, through an agent, on another one."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from choros.cluster import Slots, is_this_machine
from choros.cluster.hardware import kept_variables, plan, usable_cores, variables
from choros.comm.messages import header_of
from choros.launch.elastic.members import Member
from choros.launch.elastic.messages import DriverAddress
from choros.launch.local_job import HostShare, LaunchOptions, horovod_place
from choros.launch.ssh.agent_job import agent_job
from choros.launch.ssh.launcher import memory

ELASTIC = "CHOROS_ELASTIC"  # a ``DriverAddress``, as JSON
Prepared = tuple[list[str], dict[str, str], tuple[int, ...], tuple[int, ...]]


class ProcessStarter:
    """Builder of the commands and environments of the processes of one job.

    Args:
        command: the program and its arguments.
        options: LaunchOptions. The options of the launch; their size is ignored.
        secret: bytes. The job's secret.
        ssh: the program that starts a command on a host, and its options.
        network: the interface or domain by which the hosts reach each other.
        report: function that prints a line for each process.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: LaunchOptions,
        secret: bytes,
        ssh: str,
        network: str,
        report: Callable[[str], object],
    ) -> None:
        self._command, self._options, self._secret = list(command), options, secret
        self._ssh, self._network, self._report = ssh, network, report
        self._run = secrets.token_hex(8)
        self._shares: dict[str, int] = {}

    def member(self, number: int, host: str, slots: Slots, others: Iterable[Member], now: float) -> Member:
        """Return a new process on a host, with the lowest free slot of this host."""
        member = Member(number, host, 0, began=now)
        # Slots are counted per host, because the cores of a slot are those of its host.
        taken = {other.slot for other in others if other.machine == member.machine}
        member.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        is_local = member.machine == ""
        self._shares[member.machine] = sum(
            n for name, n in slots if (is_this_machine(name) if is_local else name == host)
        )
        return member

    def prepare(self, member: Member, place: str, first: int) -> Prepared:
        """Return the command and the environment of a process.

        Args:
            member: Member.
            place: the address of the driver, from which the process requests its rank.
            first: the number of ranks at the start. The process has it in its environment until it gets a place.

        Returns:
            The command, the environment, the cores, and the file descriptors to inherit. The caller closes these
            after the start.
        """
        size = max(first, member.number + 1)
        assignment = header_of(DriverAddress(place, member.number, self._secret.hex()))
        job_variables = {ELASTIC: json.dumps(assignment), "CHOROS_NETWORK": self._network, "CHOROS_RUN": self._run}
        shares = max(self._shares[member.machine], member.slot + 1)
        if member.machine:
            return self._prepare_remote(member, size, job_variables, shares)
        binding = plan(shares, self._options.threads, self._options.bind)[member.slot]
        crowded = not binding.cores or shares * binding.threads > len(usable_cores())
        base_environment = kept_variables(os.environ, self._options.threads)
        part = HostShare(size)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **variables(binding.threads, keep=base_environment, shared=crowded, bound=bool(binding.cores)),
            **(self._options.variables or {}),
            **horovod_place(member.number, size, part),
            **job_variables,
            **{f"CHOROS_{n}": str(v) for n, v in (("RANK", member.number), ("SIZE", size))},
            "CHOROS_SLOT": str(member.slot),
            **{f"CHOROS_LOCAL_{n}": str(v) for n, v in (("RANK", member.number), ("SIZE", size))},
        }
        cores = ",".join(map(str, binding.cores)) or "any"
        self._report(
            f"choros run: process {member.number} on {member.host}: cores {cores}; threads {binding.threads}; "
            f"{shlex.join(self._command)}"
        )
        return self._command, environment, binding.cores, ()

    def _prepare_remote(self, member: Member, size: int, variables: dict[str, str], shares: int) -> Prepared:
        agent_variables = {**variables, "CHOROS_NODE": "0", "CHOROS_NODES": "2"}
        part = HostShare(size, member.number, nodes=2, variables=agent_variables, share=(member.slot, shares))
        self._report(f"choros run: process {member.number} on {member.host}: {shlex.join(self._command)}")
        job = agent_job(member.host, self._ssh, replace(self._options, size=1), part, self._command, announce=False)
        fds = memory(json.dumps(header_of(job)).encode()), memory(b"")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CHOROS_AGENT": ",".join(map(str, fds))}
        return [sys.executable, "-m", "choros.launch.ssh.agent_client"], environment, (), fds
