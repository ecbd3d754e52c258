"""``python -m choros``, the same as the command ``choros``."""

import sys

from choros.cli import main

if __name__ == "__main__":
    sys.exit(main())
