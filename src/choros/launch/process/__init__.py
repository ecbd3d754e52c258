"""Processes on one machine: their start, their messages, their output and their end.

Imports little, so that a worker sets its cores before anything else is loaded.
"""

import sys

from choros.errors import InvalidInputError

if sys.platform == "win32":
    raise InvalidInputError("Choros starts processes on Linux (and, untested, macOS); on Windows run it inside WSL")
