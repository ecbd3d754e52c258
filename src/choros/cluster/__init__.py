"""The place of this process: its rank and the number of ranks, read from its launcher's variables; and lists of hosts.

Read from the environment alone; nothing is imported or contacted to find out.
"""

from choros.cluster.hosts import expand_hosts, expand_tasks
from choros.cluster.parsers import ClusterParser, SlurmClusterParser
from choros.cluster.place import Place, meets_by_mpi, strange, why
from choros.cluster.slots import Slots, is_this_machine, parse_slots, read_hostfile
from choros.cluster.tables import TABLES, Table

__all__ = [
    "TABLES",
    "ClusterParser",
    "Place",
    "Slots",
    "SlurmClusterParser",
    "Table",
    "expand_hosts",
    "expand_tasks",
    "is_this_machine",
    "meets_by_mpi",
    "parse_slots",
    "read_hostfile",
    "strange",
    "why",
]
