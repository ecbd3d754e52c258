"""All schedulers by name. A new scheduler needs one file and one line here."""

from __future__ import annotations

from choros.launch.schedulers.flux import FLUX
from choros.launch.schedulers.kubernetes import KUBERNETES
from choros.launch.schedulers.lsf import LSF
from choros.launch.schedulers.pbs import PBS
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.sge import SGE
from choros.launch.schedulers.slurm import SLURM
from choros.launch.schedulers.spark import SPARK

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (SLURM, PBS, FLUX, LSF, SGE, KUBERNETES, SPARK)
}
