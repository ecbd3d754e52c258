"""The progress of a comparison: one line for each algorithm, updated live on a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from choros.tools.demo.report import Result
from choros.tools.demo.report.table import decimal, summary

_CLEAR = "\r\x1b[K"


class Display:
    """Writes one line for each algorithm; on a terminal it is rewritten at each epoch until it is done.

    Args:
        names: list of str. The algorithms, in their order.
        seeds, epochs: int. How many there are of each.
        stream: where to write. Defaults to standard output.
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
        """An algorithm's run from its seed number ``run`` (0-based) begins."""
        place = f"[{self._names.index(name) + 1:>{len(str(len(self._names)))}}/{len(self._names)}]"
        self._before = f"{place} {name.ljust(self._width)}  "
        self._rewrite((f"seed {run + 1}/{self._seeds}, " if self._seeds > 1 else "") + "starting")
        if self._seeds > 1:
            self._before += f"seed {run + 1}/{self._seeds}, "

    def epoch(self, epoch: int, loss: float) -> None:
        """An epoch (0-based) has ended."""
        self._rewrite(f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}, loss {decimal(loss, 4)}")

    def end(self, result: Result) -> None:
        """An algorithm is done."""
        words = [f"failed: {summary(result.error)}"] if result.failed else []
        if result.runs:
            rate = decimal(result.mean("samples_per_second"), 0)
            words.insert(0, f"F1 {decimal(result.f1, 4)}, {decimal(result.seconds, 2)} s, {rate} samples/s")
        if self._seeds > 1:
            self._before = self._before.partition("seed ")[0]
        self._stream.write((_CLEAR if self._live else "") + self._before + "; ".join(words) + "\n")
        self._stream.flush()

    def stop(self) -> None:
        """Interrupted in the middle of a line: leave the cursor on one of its own."""
        if self._live and self._before:
            self._stream.write("\n")
            self._stream.flush()

    def _rewrite(self, text: str) -> None:
        if self._live:
            columns = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + (self._before + text)[: columns - 1])
            self._stream.flush()
