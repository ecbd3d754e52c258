"""Ranks of a job on this machine: what the command ``choros run`` and the function ``choros.run`` share."""

from choros.runner.calling import run
from choros.runner.ranks import Wish, start

__all__ = ["Wish", "run", "start"]
