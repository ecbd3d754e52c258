"""Launcher entries: the environment variables of each launcher. A new launcher is a ``LauncherEnv`` in ``TABLES``.

An installed package adds a launcher by an entry point of the group ``choros.places`` that refers to a ``LauncherEnv``.
This launcher entry is tried after ``choros`` and before the others.

The order matters, as a process often has the variables of two launchers. The inner launcher started the process. The
outer one only provided the allocation, so the inner one must be found first. The entries are tried in this order:

1. ``choros``: the variables of ``choros run``. No other launcher starts ranks inside it. ``mpi``: the rank that MPI
   reports (``CHOROS_COMM=mpi``, ``choros.comm.bootstrap.discover_rank``), if no entry below gives the place of this
   process.
2. ``torchrun``: ``srun`` or ``mpiexec`` may start it once on each node.
3. ``openmpi``, ``mpich`` (Hydra; also Intel MPI and MVAPICH 3), ``mvapich`` (2), ``pals`` (``mpiexec`` on Polaris and
   Aurora), ``jsrun`` (LSF): they run inside a scheduler's allocation. ``alps`` (``aprun`` under Cobalt or PBS) follows
   ``pals``, as the ``aprun`` of PALS also sets the rank of ALPS. ALPS sets no size, so the size comes from MPI.
4. ``flux``: a Flux instance may run inside an allocation of SLURM or LSF.
5. ``slurm``: ``srun``. The shell of ``sbatch`` is one process. It also has ``SLURM_PROCID=0`` and a task count, but no
   ``SLURM_STEP_NODELIST``. The shells of PBS, LSF and Grid Engine have variables for hosts and slots but none for a
   rank, so each is one process.
6. ``kubernetes``: an Indexed Job with the number of its pods in ``CHOROS_COMPLETIONS``. Without this variable, the pods
   count as independent jobs. ``tf_config``: the variable of TensorFlow clusters.
7. ``single``: no launcher; one process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from choros.cluster import derived_env
from choros.errors import InvalidInputError

PLACES = "choros.places"


@dataclass(frozen=True)
class LauncherEnv:
    """A launcher entry: the environment variables in which one launcher provides the place of a process.

    Each field lists candidate names; the first one that is set is used. An empty field: the launcher sets none. Rank
    and size are required. With more than one rank, local rank and local size (or ``tasks`` and ``node``) are too.

    Attributes:
        launcher: str. The name in ``Place.launcher``.
        detect_any: tuple. The launcher is detected only if any of these variables is set.
        detect_all: tuple. In addition, all of these variables must be set. Defaults to none.
        rank, size, local_rank, local_size, node, nodes: tuples. Names of variables with one number.
        hosts: tuple. Names of variables with a host list, in SLURM's compressed form or separated by commas: the hosts
            that have ranks, in the order of ``node``, so rank 0's host is the first. A host may be listed repeatedly.
        tasks: tuple. Names of variables with the number of tasks on each node, such as ``2(x3),1``.
        address, port: tuples. Names of variables with the host and port of the coordinator.
        one_node: bool. The launcher starts ranks on this machine only, unless its variables name several nodes.
        mpi: bool. The launcher starts MPI ranks, so they can communicate by MPI.
        derive: a function of the environment that returns derived variables; see ``derived_env.py``. Their names
            contain spaces, so no variable of the environment has such a name.
    """

    launcher: str
    detect_any: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    detect_all: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    port: tuple[str, ...] = ()
    one_node: bool = False
    mpi: bool = False
    derive: Callable[[Mapping[str, str]], Mapping[str, str]] | None = field(default=None, repr=False)


TABLES: tuple[LauncherEnv, ...] = (
    LauncherEnv(
        launcher="choros",
        detect_any=("CHOROS_RANK", "CHOROS_SIZE"),
        rank=("CHOROS_RANK",),
        size=("CHOROS_SIZE",),
        local_rank=("CHOROS_LOCAL_RANK",),
        local_size=("CHOROS_LOCAL_SIZE",),
        node=("CHOROS_NODE",),
        nodes=("CHOROS_NODES",),
        hosts=("CHOROS_HOSTS",),
        one_node=True,
    ),
    LauncherEnv(
        launcher="mpi",
        mpi=True,
        detect_any=("CHOROS_MPI_RANK",),
        rank=("CHOROS_MPI_RANK",),
        size=("CHOROS_MPI_SIZE",),
        local_rank=("CHOROS_MPI_LOCAL_RANK",),
        local_size=("CHOROS_MPI_LOCAL_SIZE",),
        node=("CHOROS_MPI_NODE",),
        nodes=("CHOROS_MPI_NODES",),
    ),
    LauncherEnv(
        launcher="torchrun",
        detect_any=("RANK",),
        detect_all=("WORLD_SIZE",),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK", derived_env.TORCH_LOCAL_RANK),
        local_size=("LOCAL_WORLD_SIZE", derived_env.TORCH_LOCAL_SIZE),
        node=("GROUP_RANK", "NODE_RANK", derived_env.TORCH_NODE),
        nodes=("GROUP_WORLD_SIZE", derived_env.TORCH_NODES),
        address=("MASTER_ADDR",),
        port=("MASTER_PORT",),
        derive=derived_env.of_torchrun,
    ),
    LauncherEnv(
        launcher="openmpi",
        mpi=True,
        detect_any=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        nodes=("OMPI_MCA_orte_num_nodes",),
    ),
    LauncherEnv(
        launcher="mpich",
        mpi=True,
        detect_any=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        detect_all=("PMI_RANK",),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    LauncherEnv(
        launcher="mvapich",
        mpi=True,
        detect_any=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    LauncherEnv(
        launcher="pals",
        mpi=True,
        detect_any=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank=("PALS_RANKID", "PMI_RANK", "PMIX_RANK"),
        size=("PMI_SIZE", derived_env.NODEFILE_SIZE),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node=("PALS_NODEID",),
        hosts=(derived_env.NODEFILE,),
        derive=derived_env.of_pals,
    ),
    LauncherEnv(
        launcher="alps",
        mpi=True,
        detect_any=("ALPS_APP_PE",),
        rank=("ALPS_APP_PE",),
        size=("PMI_SIZE",),
    ),
    LauncherEnv(
        launcher="jsrun",
        mpi=True,
        detect_any=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    LauncherEnv(
        launcher="flux",
        mpi=True,
        detect_any=("FLUX_TASK_RANK",),
        detect_all=("FLUX_JOB_SIZE",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        local_size=(derived_env.FLUX_LOCAL_SIZE,),
        nodes=("FLUX_JOB_NNODES",),
        derive=derived_env.of_flux,
    ),
    LauncherEnv(
        launcher="slurm",
        mpi=True,
        detect_any=("SLURM_STEP_NODELIST",),
        detect_all=("SLURM_PROCID",),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES",),
        hosts=("SLURM_STEP_NODELIST",),
        tasks=("SLURM_STEP_TASKS_PER_NODE",),
    ),
    LauncherEnv(
        launcher="kubernetes",
        detect_any=("JOB_COMPLETION_INDEX",),
        detect_all=("CHOROS_COMPLETIONS",),
        rank=("JOB_COMPLETION_INDEX",),
        size=("CHOROS_COMPLETIONS",),
        local_rank=(derived_env.POD_RANK,),
        local_size=(derived_env.POD_RANKS,),
        node=("JOB_COMPLETION_INDEX",),
        nodes=("CHOROS_COMPLETIONS",),
        address=("CHOROS_COORDINATOR",),
        derive=derived_env.of_pod,
    ),
    LauncherEnv(
        launcher="tf_config",
        detect_any=("TF_CONFIG",),
        rank=(derived_env.TF_RANK,),
        size=(derived_env.TF_SIZE,),
        local_rank=(derived_env.TF_LOCAL_RANK,),
        local_size=(derived_env.TF_LOCAL_SIZE,),
        node=(derived_env.TF_NODE,),
        hosts=(derived_env.TF_HOSTS,),
        address=(derived_env.TF_ADDRESS,),
        derive=derived_env.of_tf_config,
    ),
)


def tables() -> Iterator[LauncherEnv]:
    """Yield all launcher entries in the order in which they are tried. Packages are searched only after the first.

    Raises:
        InvalidInputError: a package's entry point cannot be loaded, or is not a ``LauncherEnv``.
    """
    first, *rest = TABLES
    yield first
    for point in points_of(PLACES):
        try:
            table = point.load()
        except Exception as error:
            raise InvalidInputError(
                f"the launcher entry {point.name!r} cannot be loaded from {point.value} "
                f"({type(error).__name__}: {error}): "
                "repair or uninstall the package"
            ) from error
        if not isinstance(table, LauncherEnv):
            raise InvalidInputError(
                f"the launcher entry {point.name!r}: {point.value} is not a choros.cluster.LauncherEnv"
            )
        yield table
    yield from rest


def points_of(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages in a group, sorted by name."""
    return _points(group, tuple(sys.path))


@functools.cache
def _points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the same for the packages in these directories. It is cached: 100 packages take 5 ms."""
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))
