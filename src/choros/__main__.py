"""``python -m choros``, the same as the command ``choros``."""

from choros.cli import run

if __name__ == "__main__":
    run()
