"""Jobs for the schedulers of clusters: scripts, and commands that submit, query, follow and cancel a job.

A ``Job`` is a checked request. ``SCHEDULERS`` maps names to ``Scheduler`` objects. ``load_site`` reads the preset of a
cluster.
"""

from choros.launch.schedulers.commands import (
    cancel_job,
    find_scheduler,
    follow_log,
    has_ended,
    job_status,
    require_program,
    submit_job,
)
from choros.launch.schedulers.job import Job, check_name
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.request import (
    JobOptions,
    complete,
    default_scheduler,
    job_of,
    name_of,
    transport_warning,
    write_script,
)
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.site import Site, load_site, presets, site_names
from choros.launch.schedulers.user_config import config_file, config_folder

__all__ = [
    "SCHEDULERS",
    "Job",
    "JobOptions",
    "Scheduler",
    "Site",
    "cancel_job",
    "check_name",
    "complete",
    "config_file",
    "config_folder",
    "default_scheduler",
    "find_scheduler",
    "follow_log",
    "has_ended",
    "job_of",
    "job_status",
    "load_site",
    "name_of",
    "presets",
    "require_program",
    "site_names",
    "submit_job",
    "transport_warning",
    "write_script",
]
