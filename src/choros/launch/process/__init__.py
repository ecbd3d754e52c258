"""Processes on one host: start, messages, output and end.

This package imports little, because a worker must bind its cores before it loads other packages.
"""

import sys

from choros.errors import InvalidInputError

if sys.platform == "win32":
    raise InvalidInputError("Choros starts processes on Linux (and, untested, macOS); on Windows run it inside WSL")
