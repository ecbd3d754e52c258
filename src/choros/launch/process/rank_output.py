"""The output of ranks: shown with their rank, and written to files if requested."""

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

from choros.errors import InvalidInputError, counted
from choros.launch.process.interrupt_filter import InterruptFilter


class Output:
    """Output that shows each line as ``[rank] line`` on the stream it came from, and writes it without rank to a file.

    Args:
        size: the number of ranks.
        folder: the folder for ``rank.N/stdout`` and ``rank.N/stderr``, with N padded to equal width. It is created if
            missing; files of an earlier run are replaced. Defaults to None, no files.
        timestamps: put the local time before each line, also in files. Defaults to False.
        first: the number of the first of these ranks, if other ranks of the job are on other hosts. Defaults to 0.
        total: the number of ranks of the job. Defaults to ``size``.
        marks: put the rank before each line; False if the lines have it already. Defaults to True.

    Attributes:
        on_broken: function called, in any thread, when the reader of stdout or stderr has closed it.
        is_interrupted: bool. Whether the ranks were interrupted: the tracebacks of ``KeyboardInterrupt`` of all but the
            first are then not shown; files have them. Defaults to False.

    Raises:
        InvalidInputError: the folder or its files cannot be created.

    Example:
        >>> output = Output(1)
        >>> output.write_line(0, "out", "hello")
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
        self.is_interrupted, self._interrupts = False, InterruptFilter()
        self._timestamps = timestamps
        self._files: dict[tuple[int, str], TextIOWrapper] = {}
        self._lock = threading.Lock()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # show earlier output of this process first
        self._folder, self._width = folder, len(str((size if total is None else total) - 1))
        for rank in range(size):
            self.keep(rank)

    def keep(self, rank: int) -> None:
        """Open the files of a rank, if a folder is given."""
        if self._folder is None:
            return
        try:
            folder = Path(self._folder, f"rank.{self._first + rank:0{self._width}}")
            folder.mkdir(parents=True, exist_ok=True)
            for kind in ("out", "err"):
                self._files[rank, kind] = open(  # noqa: SIM115 - closed by ``close``
                    folder / f"std{kind}", "w", encoding="utf-8", errors="replace", buffering=1
                )
        except OSError as error:
            self.close()
            raise InvalidInputError(f"the output of the ranks cannot be kept in {self._folder}: {error}") from None

    def write_line(self, rank: int, kind: str, line: str, mark: bool = True) -> None:
        """Show a line of a rank, and write it to the rank's file.

        Args:
            rank: the local number of the rank.
            kind: ``"out"`` or ``"err"``.
            line: the line without its line end.
            mark: False if the line has its rank already. Defaults to True.
        """
        stamp = _now() if self._timestamps else ""
        with self._lock:
            file = self._files.get((rank, kind))
            try:
                if file is not None:
                    file.write(f"{stamp}{line}\n")
            # A full disk must not end the ranks: their output is still shown.
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    self._files.pop((rank, kind)).close()
                self._show("err", f"choros run: what rank {rank} prints is no longer kept: {error}")
            text = f"{stamp}[{self._first + rank}] {line}" if self._marks and mark else line
            is_filtered = self.is_interrupted and kind == "err"
            for each in self._interrupts.feed(rank, line, text) if is_filtered else (text,):
                self._show(kind, each)

    def say(self, text: str) -> None:
        """Show a line from Choros on stderr."""
        with self._lock:
            self._show("err", f"{_now() if self._timestamps else ''}{text}")

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        acquired = self._lock.acquire(timeout=1.0)  # another thread may block forever in a write that is not read
        if acquired:
            self._end_interrupts()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
        if acquired:
            self._lock.release()

    def _end_interrupts(self) -> None:
        """Show what the filter holds, and a line on what it has left out."""
        for text in self._interrupts.rest():
            self._show("err", text)
        if count := len(self._interrupts.left_out):
            self._interrupts.left_out.clear()
            others = counted(count, "other rank")
            self._show("err", f"choros run: interrupted; not shown: the KeyboardInterrupt of {others}")

    def _show(self, kind: str, text: str) -> None:
        stream = sys.stdout if kind == "out" else sys.stderr
        if stream is None:
            return
        binary = getattr(stream, "buffer", None)
        try:
            if binary is None:  # the stream of a notebook
                stream.write(f"{text}\n")
            else:
                binary.write(f"{text}\n".encode(errors="replace"))
            stream.flush()
        except (BrokenPipeError, ValueError):
            _drop(stream)
            self.on_broken()


def _drop(stream: Any) -> None:
    """Discard the buffer of a broken stream: else Python would write it again at exit, and exit with 120."""
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
    """Return the local time to the millisecond, and a space."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03} "
