"""Facts about this machine: cores and their division among ranks, CPU features, limits, memory, libraries."""

from choros.cluster.hardware.cpu_affinity import Binding, physical_cores, plan, usable_cores
from choros.cluster.hardware.cpu_features import cpu_features
from choros.cluster.hardware.file_descriptors import raise_descriptors
from choros.cluster.hardware.mpi_vendor import MPICH_UNDER_PMI2, PMI, find_mpi
from choros.cluster.hardware.packages import version
from choros.cluster.hardware.peak_memory import peak_memory
from choros.cluster.hardware.thread_env import kept_variables, variables

__all__ = [
    "MPICH_UNDER_PMI2",
    "PMI",
    "Binding",
    "cpu_features",
    "find_mpi",
    "kept_variables",
    "peak_memory",
    "physical_cores",
    "plan",
    "raise_descriptors",
    "usable_cores",
    "variables",
    "version",
]
