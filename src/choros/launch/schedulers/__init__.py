"""Jobs for the schedulers of clusters: the script as text, and the commands that submit, ask, follow and cancel.

A ``Job`` is what was asked for, checked; ``SCHEDULERS`` has one ``Scheduler`` a name; ``load_site`` reads what is known
of a machine.
"""

from choros.cluster.hardware import find_mpi
from choros.launch.schedulers.commands import cancel_job, find_scheduler, follow_log, job_status, submit_job
from choros.launch.schedulers.job import Job, parse_time
from choros.launch.schedulers.option_support import BY_MPI, check_options
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.site import Site, load_site, site_names

__all__ = [
    "BY_MPI",
    "SCHEDULERS",
    "Job",
    "Scheduler",
    "Site",
    "cancel_job",
    "check_options",
    "find_mpi",
    "find_scheduler",
    "follow_log",
    "job_status",
    "load_site",
    "parse_time",
    "site_names",
    "submit_job",
]
