"""Processes on one machine: starting them, talking to them, their output and their end.

Imports next to nothing, so that a worker can set its cores before anything else is loaded. The parts:
``local`` (``Pool``: workers that serve calls), ``run`` (ranks of a script), ``wire`` (messages with blobs and file
descriptors), ``child`` and ``keeper`` (one process; the thread that starts them and reads their output).
"""

import sys

from choros.errors import InvalidInputError

if sys.platform == "win32":
    raise InvalidInputError("Choros starts processes on Linux (and, untested, macOS); on Windows run it inside WSL")
