"""The rank of this process and the number of ranks, from the variables of its launcher; and lists of hosts.

Only environment variables and the files that they name are read, and nothing is contacted, except by
``MpiClusterParser``, which starts MPI.
"""

from choros.cluster.cluster_parser import (
    ClusterParser,
    MpiClusterParser,
    PbsClusterParser,
    SlurmClusterParser,
    UgeClusterParser,
)
from choros.cluster.host_slots import Slots, is_this_machine, parse_slots, read_hostfile
from choros.cluster.hostlist import expand_hosts, expand_tasks
from choros.cluster.launcher_env import TABLES, LauncherEnv
from choros.cluster.rank_info import Place, connects_by_mpi, strange, why

__all__ = [
    "TABLES",
    "ClusterParser",
    "LauncherEnv",
    "MpiClusterParser",
    "PbsClusterParser",
    "Place",
    "Slots",
    "SlurmClusterParser",
    "UgeClusterParser",
    "connects_by_mpi",
    "expand_hosts",
    "expand_tasks",
    "is_this_machine",
    "parse_slots",
    "read_hostfile",
    "strange",
    "why",
]
