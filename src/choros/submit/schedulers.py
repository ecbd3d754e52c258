"""All schedulers by their names. A new one is a file of its own and a line here."""

from __future__ import annotations

from choros.submit.flux import FLUX
from choros.submit.kubernetes import KUBERNETES
from choros.submit.lsf import LSF
from choros.submit.pbs import PBS
from choros.submit.scheduler import Scheduler
from choros.submit.sge import SGE
from choros.submit.slurm import SLURM
from choros.submit.spark import SPARK

SCHEDULERS: dict[str, Scheduler] = {one.name: one for one in (SLURM, PBS, FLUX, LSF, SGE, KUBERNETES, SPARK)}
