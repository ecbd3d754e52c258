"""The classes ``ClusterParser`` and ``SlurmClusterParser`` of keras_experiments, implemented with ``Place``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from choros.cluster.hostlist import expand_hosts, expand_tasks
from choros.cluster.rank_info import Place
from choros.errors import InvalidInputError


class ClusterParser:
    """The interface of keras_experiments to a cluster: hosts, ranks on each host, parameter servers, rank, first port.

    It supports all launchers of ``Place``. A subclass may override each property.

    Args:
        num_param_servers: int. Defaults to -1, which is one for each host.
        starting_port: int. Defaults to 2300.
        network: str. A domain that is appended to the names of hosts, to select a network. Defaults to None.
        environ: an environment. Defaults to ``os.environ``.

    Attributes:
        place: Place. starting_port: int. network: str or None.

    Raises:
        InvalidInputError: the launcher's variables are invalid. A property raises it if the launcher does not report
            the value.

    Example:
        >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> parser = ClusterParser(network="ib", environ={"TF_CONFIG": text})
        >>> parser.hostnames, parser.num_tasks_per_host, parser.num_parameter_servers, parser.my_proc_id
        (['a.ib', 'b.ib'], [1, 1], 2, 1)
    """

    def __init__(
        self,
        num_param_servers: int = -1,
        starting_port: int = 2300,
        network: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self.place = Place.here(self._environ)
        self._servers, self.starting_port, self.network = num_param_servers, starting_port, network

    @property
    def hostnames(self) -> list[str]:
        """The names of the hosts, with the domain of the selected network."""
        return [f"{host}.{self.network}" if self.network else host for host in self._hosts()]

    @property
    def num_tasks_per_host(self) -> list[int]:
        """The number of ranks on each host."""
        place, hosts = self.place, len(self._hosts())
        value = self._environ.get("SLURM_STEP_TASKS_PER_NODE") if place.launcher == "slurm" else None
        if value and len(counts := expand_tasks(value)) == hosts and sum(counts) == place.size:
            return list(counts)
        if place.local_size * hosts != place.size:
            raise InvalidInputError(
                f"{place.launcher} does not report how the {place.size} ranks are placed on the {hosts} hosts."
            )
        return [place.local_size] * hosts

    @property
    def num_parameter_servers(self) -> int:
        """The requested number of parameter servers."""
        return len(self._hosts()) if self._servers < 0 else self._servers

    @property
    def my_proc_id(self) -> int:
        """This rank."""
        return self.place.rank

    def _hosts(self) -> tuple[str, ...]:
        if self.place.hosts:
            return self.place.hosts
        if self.place.nodes == 1:
            return (os.uname().nodename,)
        raise InvalidInputError(f"{self.place.launcher} does not report the names of the hosts: see choros where.")


class SlurmClusterParser(ClusterParser):
    """The same interface for SLURM only: hosts and ranks of a step, or of the whole job in the shell of the job.

    Args:
        num_param_servers, starting_port, network, environ: as in ``ClusterParser``.

    Raises:
        InvalidInputError: this process is in no SLURM job. A property raises it.

    Example:
        >>> job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "0"}
        >>> parser = SlurmClusterParser(environ=job)
        >>> parser.hostnames, parser.num_tasks_per_host, parser.num_parameter_servers, parser.my_proc_id
        (['n1', 'n2', 'n3'], [2, 2, 1], 3, 0)
    """

    @property
    def num_tasks_per_host(self) -> list[int]:
        """The number of ranks on each host."""
        return list(expand_tasks(self._told("TASKS_PER_NODE")))

    @property
    def my_proc_id(self) -> int:
        """This rank; 0 in the shell of a job."""
        value = self._environ.get("SLURM_PROCID") or "0"
        if not value.isdecimal():
            raise InvalidInputError(f"SLURM_PROCID={value} is no rank: unset it, or start this by srun.")
        return int(value)

    def _hosts(self) -> tuple[str, ...]:
        return expand_hosts(self._told("NODELIST"))

    def _told(self, name: str) -> str:
        names = (f"SLURM_STEP_{name}", "SLURM_JOB_NODELIST" if name == "NODELIST" else f"SLURM_{name}")
        for variable in names:
            if self._environ.get(variable):
                return self._environ[variable]
        raise InvalidInputError(f"this is no job of SLURM: neither {names[0]} nor {names[1]} is set.")
