"""Ranks of a job on this machine: what the command ``choros run`` and the function ``choros.run`` share."""

from choros.launch.local_job import Wish, start
from choros.launch.run_function import run

__all__ = ["Wish", "run", "start"]
