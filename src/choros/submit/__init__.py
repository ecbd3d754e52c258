"""Jobs for the schedulers of clusters: the script as text, and the commands that submit, ask, follow and cancel.

A ``Job`` is what was asked for, checked; ``SCHEDULERS`` has one ``Scheduler`` a name; ``load_site`` reads what is known
of a machine.
"""

from choros.machine import find_mpi
from choros.submit.control import cancel_job, find_scheduler, follow_log, job_status, submit_job
from choros.submit.job import Job, parse_time
from choros.submit.options import BY_MPI, check_options
from choros.submit.scheduler import Scheduler
from choros.submit.schedulers import SCHEDULERS
from choros.submit.site import Site, load_site, site_names

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
