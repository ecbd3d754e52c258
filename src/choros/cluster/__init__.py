"""Where am I: which rank of how many, told by whichever launcher started this process.

Read from the environment alone; nothing is imported or contacted to find out.
"""

from choros.cluster.hosts import expand_hosts, expand_tasks
from choros.cluster.place import Place, meets_by_mpi, why
from choros.cluster.tables import TABLES, Table

__all__ = ["TABLES", "Place", "Table", "expand_hosts", "expand_tasks", "meets_by_mpi", "why"]
