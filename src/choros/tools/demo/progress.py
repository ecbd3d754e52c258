"""The progress of a comparison: one line for each algorithm, updated live on a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from choros.tools.demo.report import Result
from choros.tools.demo.report.table import decimal, summary

_CLEAR = "\r\x1b[K"


class Display:
    """A display with one line for each algorithm. On a terminal the line is rewritten after each epoch.

    Args:
        names: list of str. The algorithms, in their order.
        seeds, epochs: int. Numbers of seeds and of epochs.
        stream: text stream for the output. Defaults to standard output.
        live: bool. Whether lines are rewritten. Defaults to whether the stream is a terminal.
    """

    def __init__(
        self, names: list[str], seeds: int, epochs: int, stream: TextIO | None = None, live: bool | None = None
    ) -> None:
        self._names, self._seeds, self._epochs = names, seeds, epochs
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty() if live is None else live
        self._width = max(map(len, names), default=0)
        self._before = ""

    def begin(self, name: str, run: int) -> None:
        """Show the start of an algorithm's run; ``run`` is the index of the seed, from 0."""
        place = f"[{self._names.index(name) + 1:>{len(str(len(self._names)))}}/{len(self._names)}]"
        self._before = f"{place} {name.ljust(self._width)}  "
        self._rewrite((f"seed {run + 1}/{self._seeds}, " if self._seeds > 1 else "") + "starting")
        if self._seeds > 1:
            self._before += f"seed {run + 1}/{self._seeds}, "

    def epoch(self, epoch: int, loss: float) -> None:
        """Show the end of an epoch, counted from 0."""
        self._rewrite(f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}, loss {decimal(loss, 4)}")

    def end(self, result: Result) -> None:
        """Show the result of an algorithm."""
        cells = [f"failed: {summary(result.error)}"] if result.failed else []
        if result.runs:
            rate = decimal(result.mean("samples_per_second"), 0)
            cells.insert(
                0, f"accuracy {decimal(result.mean('accuracy'), 3)}, {decimal(result.seconds, 2)} s, {rate} samples/s"
            )
        if self._seeds > 1:
            self._before = self._before.partition("seed ")[0]
        self._stream.write((_CLEAR if self._live else "") + self._before + "; ".join(cells) + "\n")
        self._stream.flush()

    def stop(self) -> None:
        """Start a new line after an interrupt within a line."""
        if self._live and self._before:
            self._stream.write("\n")
            self._stream.flush()

    def _rewrite(self, text: str) -> None:
        if self._live:
            columns = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + (self._before + text)[: columns - 1])
            self._stream.flush()
