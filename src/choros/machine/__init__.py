"""This machine: its cores and how ranks share them, its processor, variables that hold threads back, peak memory."""

from choros.machine.cores import Binding, physical_cores, plan, usable_cores
from choros.machine.cpu import cpu_features
from choros.machine.memory import peak_memory
from choros.machine.threads import variables

__all__ = ["Binding", "cpu_features", "peak_memory", "physical_cores", "plan", "usable_cores", "variables"]
