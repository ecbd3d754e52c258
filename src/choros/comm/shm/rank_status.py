"""The activity of each rank, in words that the others can read: for warnings and errors about missing ranks.

Three words of a rank's line on the board say how long its text is, since when it holds, and when that ended (0 while it
goes on); the texts lie behind the lines. A reader may catch a text while it is replaced: it is for people to read, and
nothing is decided by it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

TEXT: Final = 192  # bytes of one rank's text; what is longer is cut
_LENGTH, _SINCE, _ENDED = range(3)
_STATES: Final = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped by a signal", "Z": "ended"}


class RankStatus:
    """The ranks' texts: this rank's to write, everybody's to read.

    Args:
        words: memoryview of the segment's 64-bit integers.
        lines: int for each rank: the first of its three words.
        texts: int. The byte at which the first rank's text begins.
        rank: int. Who this is.

    Attributes:
        doing: str. What this rank said last, ``""`` where that has ended.

    Example:
        >>> words = memoryview(bytearray(1024)).cast("q")
        >>> zero, one = (RankStatus(words, [0, 3], 64, rank) for rank in (0, 1))
        >>> zero.say("allreduce 'loss'")
        >>> zero.doing, one.said(0)
        ("allreduce 'loss'", "it has been in allreduce 'loss' for 0.0 s")
        >>> zero.say("")
        >>> one.said(0)
        "its last call, allreduce 'loss', ended 0.0 s ago"
    """

    def __init__(self, words: memoryview, lines: Sequence[int], texts: int, rank: int) -> None:
        self.doing = ""
        self._words, self._bytes = words, words.cast("B")
        self._lines, self._texts = list(lines), texts
        self._line, self._text = self._lines[rank], texts + rank * TEXT
        self._written = ""

    def say(self, text: str) -> None:
        """Let the others know what this rank is about; ``""``: that it has ended."""
        self.doing = text
        words, line = self._words, self._line
        if not text:
            words[line + _ENDED] = time.monotonic_ns()
            return
        if text is not self._written:
            data = text.encode()[:TEXT]
            self._bytes[self._text : self._text + len(data)] = data
            words[line + _LENGTH], self._written = len(data), text
        words[line + _SINCE], words[line + _ENDED] = time.monotonic_ns(), 0

    def said(self, rank: int) -> str:
        """Return the present or last activity of a rank, and since when."""
        text, since, ended = self._read(rank)
        now = time.monotonic_ns()
        if not text:
            return "it has named no call yet"
        if ended:
            return f"its last call, {text}, ended {max(now - ended, 0) / 1e9:.1f} s ago"
        return f"it has been in {text} for {max(now - since, 0) / 1e9:.1f} s"

    def doing_of(self, rank: int) -> str:
        """Return the present activity of a rank, or ``""``."""
        text, _, ended = self._read(rank)
        return "" if ended else text

    def _read(self, rank: int) -> tuple[str, int, int]:
        words, line, begin = self._words, self._lines[rank], self._texts + rank * TEXT
        text = bytes(self._bytes[begin : begin + words[line + _LENGTH]]).decode(errors="replace")
        return text, words[line + _SINCE], words[line + _ENDED]


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel gives it (Linux), else ``"alive"``.

    Example:
        >>> import os
        >>> state_of(os.getpid()) in ("running", "alive")
        True
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "alive"
    return _STATES.get(letter, "alive")
