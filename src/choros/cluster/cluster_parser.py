"""``ClusterParser`` and ``SlurmClusterParser`` of keras_experiments, and parsers for PBS, Grid Engine and MPI."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from choros.argument_checks import check_number, check_text, check_whole
from choros.cluster.host_slots import Slots
from choros.cluster.hostlist import expand_hosts, expand_tasks
from choros.cluster.rank_info import Place, connects_by_mpi
from choros.errors import InvalidInputError, counted
from choros.object_text import call_text


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
        if environ is not None and not isinstance(environ, Mapping):
            raise InvalidInputError(f"environ is of type {type(environ).__name__}: give a dict of variables.")
        self._environ = os.environ if environ is None else environ
        self.place = self._read_place()
        self._servers = check_whole("num_param_servers", num_param_servers, -1)
        self.starting_port = check_whole("starting_port", starting_port, 0)
        self.network = network if network in (None, "") else check_text("network", network, "a domain such as 'ib'")

    def __repr__(self) -> str:
        # Without the environment, which may hold secrets.
        return call_text(self, num_param_servers=self._servers, starting_port=self.starting_port, network=self.network)

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
                f"{place.launcher} does not report how the {place.size} ranks are placed on the "
                f"{counted(hosts, 'host')}."
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

    def _read_place(self) -> Place:
        return Place.here(self._environ)

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
        return list(expand_tasks(self._variable("TASKS_PER_NODE")))

    @property
    def my_proc_id(self) -> int:
        """This rank; 0 in the shell of a job."""
        value = self._environ.get("SLURM_PROCID") or "0"
        if not value.isdecimal():
            raise InvalidInputError(f"SLURM_PROCID={value} is not a rank: unset it, or start this by srun.")
        return int(value)

    def _hosts(self) -> tuple[str, ...]:
        return expand_hosts(self._variable("NODELIST"))

    def _variable(self, name: str) -> str:
        names = (f"SLURM_STEP_{name}", "SLURM_JOB_NODELIST" if name == "NODELIST" else f"SLURM_{name}")
        for variable in names:
            if self._environ.get(variable):
                return self._environ[variable]
        raise InvalidInputError(f"this is not a job of SLURM: neither {names[0]} nor {names[1]} is set.")


class _FileClusterParser(ClusterParser, ABC):
    """A parser for a scheduler that writes the hosts of a job and their slots to a file.

    A slot may be a core, so the number of ranks on a host may differ from its slots.
    """

    _scheduler, _file_variable = "", ""

    @property
    def num_tasks_per_host(self) -> list[int]:
        """The number of ranks on each host: its slots, or as many as on this host if the launcher did not fill them."""
        counts, place = [count for _, count in self._slots()], self.place
        if place.launcher == "single" or (sum(counts) == place.size and place.local_size in counts):
            return counts
        if place.local_size * len(counts) != place.size:
            raise InvalidInputError(
                f"{place.launcher} started {place.size} ranks, {place.local_size} of them on this host, and "
                f"{self._file_variable} lists {counted(sum(counts), 'slot')} on {counted(len(counts), 'host')}, so the "
                "ranks of the other hosts are unknown: start one rank for each slot or equal numbers on all hosts, or "
                "start them with mpiexec and use MpiClusterParser, which asks all ranks."
            )
        return [place.local_size] * len(counts)

    def _hosts(self) -> tuple[str, ...]:
        return tuple(host for host, _ in self._slots())

    def _slots(self) -> Slots:
        name = self._file_variable
        path = self._environ.get(name)
        if not path:
            raise InvalidInputError(f"this is not a job of {self._scheduler}: {name} is not set.")
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"{name}={path} cannot be read ({getattr(error, 'strerror', None) or error}). The scheduler may write "
                f"it on the first host of a job only: copy it to a directory of all hosts, and set {name} to the copy."
            ) from None
        slots: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            if fields := line.split():
                host, count = self._read_line(fields, f"line {number} of {name}={path} is {line!r}")
                slots[host] = slots.get(host, 0) + count
        if not slots:
            raise InvalidInputError(f"{name}={path} lists no host: set it to the file that {self._scheduler} wrote.")
        return tuple(slots.items())

    @abstractmethod
    def _read_line(self, fields: list[str], where: str) -> tuple[str, int]:
        """Return the host and the slots of a line; ``where`` begins the message of an error."""


class PbsClusterParser(_FileClusterParser):
    r"""The same interface for PBS (OpenPBS, PBS Professional, Torque): the hosts of ``PBS_NODEFILE``.

    The file has a line for each slot of a host (``mpiprocs``). The rank is that of the launcher inside the job, and 0
    in the shell of the job.

    Args:
        num_param_servers, starting_port, network, environ: as in ``ClusterParser``.

    Raises:
        InvalidInputError: this process is in no job of PBS, or the file is invalid. A property raises it.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     print("n1", "n1", "n2", sep="\n", file=file, flush=True)
        ...     parser = PbsClusterParser(environ={"PBS_NODEFILE": file.name})
        ...     parser.hostnames, parser.num_tasks_per_host, parser.num_parameter_servers, parser.my_proc_id
        (['n1', 'n2'], [2, 1], 2, 0)
    """

    _scheduler, _file_variable = "PBS", "PBS_NODEFILE"

    def _read_line(self, fields: list[str], where: str) -> tuple[str, int]:
        if len(fields) != 1:
            raise InvalidInputError(f"{where}, not the name of a host: set PBS_NODEFILE to the file that PBS wrote.")
        return fields[0], 1


class UgeClusterParser(_FileClusterParser):
    r"""The same interface for Grid Engine (Univa, Altair, Sun): the hosts of ``PE_HOSTFILE``.

    A line has a host, its slots, a queue and a range of processors. The slots of a host in several queues are added.
    The rank is that of the launcher inside the job, and 0 in the shell of the job.

    Args:
        num_param_servers, starting_port, network, environ: as in ``ClusterParser``.

    Raises:
        InvalidInputError: this process is in no parallel job of Grid Engine, or the file is invalid. A property raises
            it.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     print("n1 2 all.q@n1 UNDEFINED", "n2 1 all.q@n2 UNDEFINED", sep="\n", file=file, flush=True)
        ...     parser = UgeClusterParser(environ={"PE_HOSTFILE": file.name})
        ...     parser.hostnames, parser.num_tasks_per_host, parser.num_parameter_servers, parser.my_proc_id
        (['n1', 'n2'], [2, 1], 2, 0)
    """

    _scheduler, _file_variable = "Grid Engine", "PE_HOSTFILE"

    def _read_line(self, fields: list[str], where: str) -> tuple[str, int]:
        if len(fields) < 2 or not (fields[1].isascii() and fields[1].isdecimal() and int(fields[1])):
            raise InvalidInputError(
                f"{where}, not of the form: host slots queue range. Set PE_HOSTFILE to the file that Grid Engine wrote."
            )
        return fields[0], int(fields[1])


class MpiClusterParser(ClusterParser):
    """The same interface for ranks of any MPI: all ranks exchange the names of their hosts. All ranks make one.

    The hosts are in the order of their first rank. MPI is started if it has not been started. mpi4py is needed.

    Args:
        num_param_servers, starting_port, network, environ: as in ``ClusterParser``.
        timeout: float. Seconds that the start of MPI and the exchange may each last. After that this process is ended.
            Defaults to 300.

    Raises:
        InvalidInputError: mpi4py is missing, or MPI does not belong to the launcher of this process.

    Example:
        >>> parser = MpiClusterParser()  # doctest: +SKIP
        >>> parser.hostnames, parser.num_tasks_per_host, parser.my_proc_id  # doctest: +SKIP
        (['n1', 'n2'], [2, 1], 0)
    """

    def __init__(
        self,
        num_param_servers: int = -1,
        starting_port: int = 2300,
        network: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._timeout = check_number("timeout", timeout, "a number of seconds")
        super().__init__(num_param_servers, starting_port, network, environ=environ)

    @property
    def num_tasks_per_host(self) -> list[int]:
        """The number of ranks on each host."""
        return [self._names.count(host) for host in self.place.hosts]

    def _read_place(self) -> Place:
        from choros.cluster.hardware import MPICH_UNDER_PMI2
        from choros.cluster.mpi_library import gather_names, remedy

        try:
            reported = Place.here(self._environ)
        except InvalidInputError:  # MPI knows the place even if the variables do not give it
            reported = Place()
        if reported.launcher == "slurm":
            for name, value in MPICH_UNDER_PMI2.items():  # MPICH reads them at its start
                os.environ.setdefault(name, value)
        rank, self._names = gather_names(os.uname().nodename, self._timeout)
        if connects_by_mpi(reported.launcher) and reported.size != len(self._names):
            raise InvalidInputError(
                f"MPI reports a size of {len(self._names)}, but {reported.launcher} started {reported.size} ranks. "
                f"{remedy()}"
            )
        if reported.size > len(self._names):
            raise InvalidInputError(
                f"{reported.launcher} started {reported.size} ranks without MPI, which reports a size of "
                f"{len(self._names)}: use ClusterParser, which reads the variables of any launcher, or start the ranks "
                "with mpiexec."
            )
        return _place_of(rank, self._names)


def _place_of(rank: int, names: Sequence[str]) -> Place:
    """Return the place of a rank from the host name of each rank."""
    hosts = tuple(dict.fromkeys(names))
    host = names[rank]
    return Place(
        rank,
        len(names),
        names[:rank].count(host),
        names.count(host),
        hosts.index(host),
        len(hosts),
        hosts,
        hosts[0],
        "mpi",
    )
