"""The output of ranks: shown with their rank, and kept in files if asked for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from choros.errors import InvalidInputError


class Output:
    """Shows each line as ``[rank] line`` on stdout or stderr, whichever it came from, and keeps it as it came.

    Args:
        size: how many ranks.
        folder: where to keep ``rank.N/stdout`` and ``rank.N/stderr``, N being as wide as that of the last rank;
            made where it is not there, files of an earlier run are replaced. Nowhere when None.
        timestamps: put the local time before each line, shown or kept.
        first: the number of the first of these ranks, where others of the job are on other hosts.
        total: how many ranks the job has in all; ``size`` when None.
        marks: put the rank before each line; False where the lines have it already.

    Attributes:
        on_broken: is called, from whichever thread, when nobody reads what is shown any more.

    Raises:
        InvalidInputError: the folder or its files cannot be made.

    Example:
        >>> output = Output(1)
        >>> output.line(0, "out", "hello")
        [0] hello
        >>> output.close()
    """

    def __init__(
        self,
        size: int,
        folder: str | None = None,
        timestamps: bool = False,
        first: int = 0,
        total: int | None = None,
        marks: bool = True,
    ) -> None:
        self._first, self._marks = first, marks
        self.on_broken: Callable[[], None] = lambda: None
        self._timestamps = timestamps
        self._files: dict[tuple[int, str], TextIOWrapper] = {}
        self._lock = threading.Lock()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # what this process printed before comes before
        self._folder, self._width = folder, len(str((size if total is None else total) - 1))
        for rank in range(size):
            self.keep(rank)

    def keep(self, rank: int) -> None:
        """Begin to keep what a rank prints, where that was asked for."""
        if self._folder is None:
            return
        try:
            own = Path(self._folder, f"rank.{self._first + rank:0{self._width}}")
            own.mkdir(parents=True, exist_ok=True)
            for kind in ("out", "err"):
                self._files[rank, kind] = open(  # noqa: SIM115 - closed by ``close``
                    own / f"std{kind}", "w", encoding="utf-8", errors="replace", buffering=1
                )
        except OSError as error:
            self.close()
            raise InvalidInputError(f"the output of the ranks cannot be kept in {self._folder}: {error}") from None

    def line(self, rank: int, kind: str, line: str, mark: bool = True) -> None:
        """Show and keep a whole line of a rank.

        Args:
            rank: whose it is.
            kind: ``"out"`` or ``"err"``.
            line: without its end.
            mark: False where it has its rank already.
        """
        stamp = _now() if self._timestamps else ""
        with self._lock:
            file = self._files.get((rank, kind))
            try:
                if file is not None:
                    file.write(f"{stamp}{line}\n")
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    self._files.pop((rank, kind)).close()
                self._show("err", f"choros run: what rank {rank} prints is no longer kept: {error}")
            self._show(kind, f"{stamp}[{self._first + rank}] {line}" if self._marks and mark else line)

    def say(self, text: str) -> None:
        """Show a line of Choros itself on stderr."""
        with self._lock:
            self._show("err", f"{_now() if self._timestamps else ''}{text}")

    def close(self) -> None:
        """Close the files; again does nothing."""
        held = self._lock.acquire(timeout=1.0)  # another thread may be stuck where nobody reads what is shown
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
        if held:
            self._lock.release()

    def _show(self, kind: str, text: str) -> None:
        stream = sys.stdout if kind == "out" else sys.stderr
        if stream is None:
            return
        binary = getattr(stream, "buffer", None)
        try:
            if binary is None:  # a notebook's
                stream.write(f"{text}\n")
            else:
                binary.write(f"{text}\n".encode(errors="replace"))
            stream.flush()
        except (BrokenPipeError, ValueError):
            _drop(stream)
            self.on_broken()


def _drop(stream: Any) -> None:
    """Forget what a stream holds that nobody reads: at the end Python would try again, and exit with 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        broken, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, number, inheritable=True)
            stream.flush()
        finally:
            os.dup2(broken, number, inheritable=True)
            os.close(broken)
            os.close(nowhere)


def _now() -> str:
    """The local time to the millisecond, and a space."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03} "
