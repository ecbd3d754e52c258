"""Jobs for the schedulers of clusters: scripts, and commands that submit, query, follow and cancel a job.

A ``Job`` is a checked request. ``SCHEDULERS`` maps names to ``Scheduler`` objects. ``load_site`` reads the preset of a
cluster.
"""

from choros.cluster.hardware import find_mpi
from choros.launch.schedulers.commands import (
    cancel_job,
    find_scheduler,
    follow_log,
    job_status,
    require_program,
    submit_job,
)
from choros.launch.schedulers.job import Job, parse_time
from choros.launch.schedulers.option_support import BY_MPI, accepts, check_options
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.site import Site, load_site, site_names
from choros.launch.schedulers.user_config import config_file, config_folder, submit_defaults

__all__ = [
    "BY_MPI",
    "SCHEDULERS",
    "Job",
    "Scheduler",
    "Site",
    "accepts",
    "cancel_job",
    "check_options",
    "config_file",
    "config_folder",
    "find_mpi",
    "find_scheduler",
    "follow_log",
    "job_status",
    "load_site",
    "parse_time",
    "require_program",
    "site_names",
    "submit_defaults",
    "submit_job",
]
