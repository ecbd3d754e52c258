"""This machine: cores, their division among ranks, CPU features, limits of threads and files, memory, libraries."""

from choros.machine.cores import Binding, physical_cores, plan, usable_cores
from choros.machine.cpu import cpu_features
from choros.machine.descriptors import raise_descriptors
from choros.machine.installed import keras_backend, version
from choros.machine.memory import peak_memory
from choros.machine.own_mpi import MPICH_UNDER_PMI2, PMI, find_mpi
from choros.machine.threads import variables

__all__ = [
    "MPICH_UNDER_PMI2",
    "PMI",
    "Binding",
    "cpu_features",
    "find_mpi",
    "keras_backend",
    "peak_memory",
    "physical_cores",
    "plan",
    "raise_descriptors",
    "usable_cores",
    "variables",
    "version",
]
