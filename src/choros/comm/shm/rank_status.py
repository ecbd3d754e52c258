"""Status text of each rank in shared memory, for warnings and errors about missing ranks.

Three words of a rank's record hold the length of its text, the start time, and the end time (0 during the activity).
The texts follow the records. No lock protects a text: a reader may see a text that is half replaced. That is
acceptable, as only messages for people contain these texts and no code decides by them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

STATUS_BYTES: Final = 192  # bytes of one rank's text; a longer text is cut
_LENGTH, _SINCE, _ENDED = range(3)
_STATES: Final = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped by a signal", "Z": "ended"}


class RankStatus:
    """Status texts of all ranks. A rank writes its own text and reads all texts.

    Args:
        words: memoryview of the segment's 64-bit integers.
        records: list of int. For each rank, the index of the first of its three words.
        texts: int. Byte offset of the first rank's text.
        rank: int. This rank.

    Attributes:
        doing: str. The present activity of this rank; ``""`` if it has ended.

    Example:
        >>> words = memoryview(bytearray(1024)).cast("q")
        >>> zero, one = (RankStatus(words, [0, 3], 64, rank) for rank in (0, 1))
        >>> zero.set("allreduce 'loss'")
        >>> zero.doing, one.describe(0)
        ("allreduce 'loss'", "it has been in allreduce 'loss' for 0.0 s")
        >>> zero.set("")
        >>> one.describe(0)
        "its last call, allreduce 'loss', ended 0.0 s ago"
    """

    def __init__(self, words: memoryview, records: Sequence[int], texts: int, rank: int) -> None:
        self.doing = ""
        self._words, self._bytes = words, words.cast("B")
        self._records, self._texts = list(records), texts
        self._record, self._text = self._records[rank], texts + rank * STATUS_BYTES
        self._written = ""

    def set(self, text: str) -> None:
        """Publish this rank's activity; ``""`` marks the last activity as ended."""
        self.doing = text
        words, record = self._words, self._record
        if not text:
            words[record + _ENDED] = time.monotonic_ns()
            return
        if text is not self._written:  # a training loop repeats the same text object: then only the times change
            data = text.encode()[:STATUS_BYTES]
            self._bytes[self._text : self._text + len(data)] = data
            # The length follows the text, so a reader of the old length sees at most a mixture of texts, never bytes
            # beyond them.
            words[record + _LENGTH], self._written = len(data), text
        # CLOCK_MONOTONIC counts from the machine's boot, so the times of different processes of a host can be compared.
        words[record + _SINCE], words[record + _ENDED] = time.monotonic_ns(), 0

    def describe(self, rank: int) -> str:
        """Return a sentence on the present or last activity of a rank, with its duration in seconds."""
        text, since, ended = self._read(rank)
        now = time.monotonic_ns()
        # The text stays: a message about a rank outside any call names its last call.
        if not text:
            return "it has named no call yet"
        if ended:
            return f"its last call, {text}, ended {max(now - ended, 0) / 1e9:.1f} s ago"
        return f"it has been in {text} for {max(now - since, 0) / 1e9:.1f} s"

    def current(self, rank: int) -> str:
        """Return the present activity of a rank, or ``""``."""
        text, _, ended = self._read(rank)
        return "" if ended else text

    def _read(self, rank: int) -> tuple[str, int, int]:
        words, record, begin = self._words, self._records[rank], self._texts + rank * STATUS_BYTES
        # ``errors="replace"``: the cut at 192 bytes and a concurrent write may split a character.
        text = bytes(self._bytes[begin : begin + words[record + _LENGTH]]).decode(errors="replace")
        return text, words[record + _SINCE], words[record + _ENDED]


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel gives it (Linux), else ``"alive"``.

    Example:
        >>> import os
        >>> state_of(os.getpid()) in ("running", "alive")
        True
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command name in brackets may itself contain spaces and brackets.
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "alive"
    return _STATES.get(letter, "alive")
