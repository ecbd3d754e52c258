"""The log handler of Choros, and the output of its programs.

Modules log by ``logging.getLogger(__name__)``, launchers by ``logging.getLogger("choros.run")``. ``import choros`` adds
one handler to the logger ``choros``, in the caller's process and in every worker. It writes messages of level INFO and
above to stderr, so that a script without a logging configuration shows them. To silence or to redirect them:

    >>> import logging
    >>> logging.getLogger("choros").setLevel(logging.ERROR)  # only errors
    >>> logging.getLogger("choros").setLevel(logging.INFO)  # the default

``logging.getLogger("choros").handlers.clear()`` and ``propagate = True`` leave the messages to the root logger.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO

LAUNCHER = "choros.run"  # the logger of messages that begin with "choros run: "


class _StderrHandler(logging.Handler):
    """Writes each message to the current ``sys.stderr``, which a caller may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a closed or missing stderr must not end the caller."""
        prefix = "choros run" if record.name == LAUNCHER else "choros"
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                write_line(f"{prefix}: {self.format(record)}", sys.stderr)


def add_handler() -> None:
    """Add the handler to the logger ``choros``, unless the logger has one."""
    logger = logging.getLogger("choros")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def write_line(text: str, stream: TextIO | None = None) -> None:
    r"""Write a line of a program's output, and flush it.

    Args:
        text: the line, without its line end.
        stream: the stream. Defaults to the current ``sys.stdout``. Nothing is written if that is None.

    Raises:
        OSError: the stream cannot be written to, for example a closed pipe.

    Example:
        >>> write_line("rank 0 is ready")
        rank 0 is ready
    """
    stream = sys.stdout if stream is None else stream
    if stream is not None:
        stream.write(f"{text}\n")  # one call, so that lines of several threads do not mix
        stream.flush()
