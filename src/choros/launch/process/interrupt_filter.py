"""A filter for the output of interrupted ranks: after Ctrl-C only rank 0 shows its ``KeyboardInterrupt`` traceback."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BEGIN = "Traceback (most recent call last):"
_BETWEEN = (  # the lines between two exceptions of a chain
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_INTERRUPT = re.compile(r"KeyboardInterrupt(:|$)")


@dataclass
class _Chain:
    """The lines of exceptions that belong together. ``exception``: the last line of the last traceback, or ""."""

    lines: list[str]
    exception: str = ""


class InterruptFilter:
    """A filter of the lines that ranks write to stderr.

    Attributes:
        left_out: set of int. The ranks whose traceback was left out.

    Example:
        >>> interrupts = InterruptFilter()
        >>> for line in ("Traceback (most recent call last):", '  File "a.py", line 1', "KeyboardInterrupt", "end"):
        ...     print(interrupts.feed(1, line, f"[1] {line}"))
        []
        []
        []
        ['[1] end']
    """

    def __init__(self) -> None:
        self.left_out: set[int] = set()
        self._chains: dict[int, _Chain] = {}  # of the ranks that write a traceback

    def feed(self, rank: int, line: str, text: str) -> list[str]:
        """Take a line, and return the texts to show now. Tracebacks are held until the line after their chain.

        Args:
            rank: the local number of the rank.
            line: the line as the rank wrote it.
            text: the line as it is shown.
        """
        chain = self._chains.get(rank)
        if chain is None:
            if rank == 0 or line != _BEGIN:
                return [text]
            self._chains[rank] = _Chain([text])
            return []
        if chain.exception and line != _BEGIN and line not in _BETWEEN:
            return self._end(rank) + self.feed(rank, line, text)
        chain.lines.append(text)
        if line == _BEGIN:
            chain.exception = ""
        elif not chain.exception and not line.startswith(" "):
            chain.exception = line
        return []

    def rest(self) -> list[str]:
        """Return the lines that are still held, when the ranks have ended."""
        return [text for rank in list(self._chains) for text in self._end(rank)]

    def _end(self, rank: int) -> list[str]:
        """Return the lines of a chain; none if its last exception is an interrupt."""
        chain = self._chains.pop(rank)
        if not _INTERRUPT.match(chain.exception):
            return chain.lines
        self.left_out.add(rank)
        return []
