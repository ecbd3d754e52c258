"""The progress of a comparison: one line for each algorithm, and on a terminal a bar of its epochs by ``rich``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from choros.tools.demo.report import Result
from choros.tools.demo.report.table import decimal, summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class Display:
    """A display with one line for each algorithm. On a terminal a bar is updated after each epoch.

    Args:
        names: list of str. The algorithms, in their order.
        seeds, epochs: int. Numbers of seeds and of epochs.
        console: the terminal, or None for plain lines. Defaults to None.
        stream: text stream for plain lines. Defaults to standard output.
    """

    def __init__(
        self,
        names: list[str],
        seeds: int,
        epochs: int,
        console: Console | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._names, self._seeds, self._epochs = names, seeds, epochs
        self._console, self._stream = console, sys.stdout if stream is None else stream
        self._width = max(map(len, names), default=0)
        self._live: Progress | None = None
        self._seed = ""

    def begin(self, name: str, run: int) -> None:
        """Show the start of an algorithm's run; ``run`` is the index of the seed, from 0."""
        if self._console is None:
            return
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self.stop()
        self._seed = f"seed {run + 1}/{self._seeds}, " if self._seeds > 1 else ""
        text = TextColumn(
            "{task.description}{task.fields[state]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        # Without a thread that refreshes: the processes of workers are started meanwhile.
        self._live = Progress(text, BarColumn(), console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._live.add_task(self._prefix(name), total=self._epochs, state=f"{self._seed}starting")
        self._live.refresh()

    def epoch(self, epoch: int, loss: float) -> None:
        """Show the end of an epoch, counted from 0."""
        if self._live is not None:
            done = f"{epoch + 1:>{len(str(self._epochs))}}/{self._epochs}"
            state = f"{self._seed}epoch {done}, loss {decimal(loss, 4)}"
            self._live.update(self._live.task_ids[0], completed=epoch + 1, state=state, refresh=True)

    def end(self, result: Result) -> None:
        """Show the result of an algorithm."""
        self.stop()
        cells = [f"failed: {summary(result.error)}"] if result.failed else []
        if result.runs:
            rate = decimal(result.mean("samples_per_second"), 0)
            # The seconds of the only epoch include compiling.
            speed = f", {decimal(result.seconds, 2)} s, {rate} samples/s" if self._epochs > 1 else ""
            cells.insert(0, f"accuracy {decimal(result.mean('accuracy'), 3)}{speed}")
        line = self._prefix(result.algorithm) + "; ".join(cells)
        if self._console is None:
            self._stream.write(f"{line}\n")
            self._stream.flush()
            return
        from rich.text import Text

        shown = Text(line)
        shown.highlight_regex(r"failed: .*", "bold red")
        self._console.print(shown, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar, if there is one."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _prefix(self, name: str) -> str:
        place = f"[{self._names.index(name) + 1:>{len(str(len(self._names)))}}/{len(self._names)}]"
        return f"{place} {name.ljust(self._width)}  "
