"""A filter for the output of interrupted ranks: after Ctrl-C only rank 0 shows its ``KeyboardInterrupt`` traceback."""

from __future__ import annotations

import re

_BEGIN = "Traceback (most recent call last):"
_INTERRUPT = re.compile(r"KeyboardInterrupt(:|$)")


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
        self._held: dict[int, list[str]] = {}  # for each rank inside a traceback, the lines so far

    def feed(self, rank: int, line: str, text: str) -> list[str]:
        """Take a line, and return the texts to show now. A traceback is held until its last line is known.

        Args:
            rank: the local number of the rank.
            line: the line as the rank wrote it.
            text: the line as it is shown.
        """
        if rank not in self._held:
            if rank == 0 or line != _BEGIN:
                return [text]
            self._held[rank] = [text]
            return []
        self._held[rank].append(text)
        if line.startswith((" ", _BEGIN)):
            return []
        held = self._held.pop(rank)
        if _INTERRUPT.match(line):
            self.left_out.add(rank)
            return []
        return held

    def rest(self) -> list[str]:
        """Return the lines of tracebacks without a last line, when the ranks have ended."""
        lines = [text for held in self._held.values() for text in held]
        self._held.clear()
        return lines
