"""``choros.Ray``: workers of a ``Trainer`` on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from choros.argument_checks import check_number, check_text, check_whole
from choros.cluster.hardware.gpus import DEVICE_VARIABLES
from choros.errors import InvalidInputError, suggestion
from choros.launch.process.child_process import python_variables
from choros.launch.ray_cluster.connection import STRATEGIES, connect, most_workers, node_resources, refuse_client
from choros.launch.ray_cluster.reservation import Reservation
from choros.launch.ray_cluster.shell_server import ShellServer
from choros.launch.specs import LaunchedJob, LaunchPreferences
from choros.object_text import call_text

_TIMEOUT = 300.0
# Variables of the caller that would replace those that Ray sets on the nodes.
_NODE_PREFIXES = ("RAY_", *DEVICE_VARIABLES)


class Ray:
    """Launcher of workers on the nodes of a Ray cluster.

    The workers are ranks as with ``choros.Ssh``: they exchange by sockets of their own. During a ``fit`` actors of Ray
    hold the resources of the workers. Callbacks, progress and output are in the process that calls ``fit``, on a node
    of the cluster: a script of ``ray job submit``, a notebook, or a task of no CPU. All nodes need this Python
    and its packages at the same paths. The model's code is in files in the working directory, which are copied to nodes
    that do not share it. Workers are not bound to cores, because Ray does not say which cores of a node are free.

    Args:
        cores: int. CPUs of each worker, by Ray's count, and its threads. Defaults to 1.
        gpus: int. GPUs of each worker. Defaults to 0.
        address: str. The address of the cluster, used if this process has no connection. Defaults to "": the cluster
            of ``RAY_ADDRESS``, else that of this machine.
        strategy: str. How Ray places the workers: "PACK" on few nodes, "SPREAD" over many, "STRICT_PACK" on one,
            "STRICT_SPREAD" each on another one. Defaults to "PACK".
        timeout: float. Seconds to wait for the resources. Defaults to 300.

    Raises:
        InvalidInputError: an argument that is not valid.

    Example:
        >>> Ray(cores=2, strategy="SPREAD")
        Ray(cores=2, gpus=0, strategy='SPREAD')
    """

    def __init__(
        self, cores: int = 1, gpus: int = 0, *, address: str = "", strategy: str = "PACK", timeout: float = _TIMEOUT
    ) -> None:
        self.cores = check_whole("cores", cores, 1)
        self.gpus = check_whole("gpus", gpus, 0)
        self.address = address if address == "" else check_text("address", address, "host:port, such as 'head:6379'")
        refuse_client(self.address)
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise InvalidInputError(
                f"strategy={strategy!r:.60}: {suggestion(str(strategy), STRATEGIES, 'give one of')}."
            )
        self.strategy = strategy
        remedy = "a number of seconds above 0"
        self.timeout = check_number("timeout", timeout, remedy)
        if not self.timeout:
            raise InvalidInputError(f"timeout={timeout!r}: give {remedy}.")

    def __repr__(self) -> str:
        return call_text(
            self,
            cores=self.cores,
            gpus=self.gpus,
            address=self.address or None,
            strategy=self.strategy,
            timeout=None if self.timeout == _TIMEOUT else self.timeout,
        )

    @property
    def here(self) -> bool:
        """False, since this host need not have a worker."""
        return False

    def size(self) -> int:
        """Return the number of workers that the cluster's nodes have room for, whether they are free now or not.

        Raises:
            InvalidInputError: there is no cluster, or the connection is one of Ray Client.
            MissingPackageError: Ray is not installed.
        """
        connect(self.address)
        return most_workers(node_resources(), self.cores, self.gpus, self.strategy)

    def start(self, module: str, ranks: int, environ: Mapping[str, str], preferences: LaunchPreferences) -> LaunchedJob:
        """Reserve the resources, then start ``choros run`` with ``module`` as the command.

        Raises:
            WorkerFailedError: the resources were not free in time, or a node could not be prepared.
        """
        connect(self.address)
        reservation = Reservation(ranks, self.cores, self.gpus, self.strategy, self.timeout)
        try:
            reservation.place_files(os.getcwd(), preferences.files)
            command = [sys.executable, "-m", "choros", "run", "-n", str(ranks), "-H", reservation.hosts, "--no-bind"]
            command += ["--threads", str(preferences.threads or self.cores)]
            command += ["--network", preferences.network] if preferences.network else []
            inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NODE_PREFIXES)}
            return RayJob(command, module, {**inherited, **python_variables(), **environ}, reservation)
        except BaseException:
            reservation.close()
            raise


class RayJob(LaunchedJob):
    """A running ``choros run`` whose ranks are on nodes of a Ray cluster. ``end`` frees their resources.

    Args:
        command: ``choros run`` and its options, without ``--ssh``.
        module: the module that the ranks run.
        environ: environment variables of the command.
        reservation: Reservation.
    """

    def __init__(
        self, command: Sequence[str], module: str, environ: Mapping[str, str], reservation: Reservation
    ) -> None:
        self._reservation = reservation
        self._server = ShellServer(reservation.nodes)
        try:
            super().__init__([*command, "--ssh", self._server.command, "-m", module], environ)
        except BaseException:
            self._server.close()
            raise

    def end(self, patience: float = 0.0) -> None:
        """End ``choros run`` as ``LaunchedJob.end`` does, then free the resources."""
        try:
            super().end(patience)
        finally:
            # The actors first: a thread of the server may wait for a command of theirs that did not end.
            self._reservation.close()
            self._server.close()
