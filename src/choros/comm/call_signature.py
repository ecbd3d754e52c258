"""Signature of a collective call, which the ranks compare. Ranks whose calls differ raise an error, and do not hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from choros.comm.dtypes import dtype_name

BARRIER, SUM_SLOTS, SUM, GATHER, BROADCAST, LEAVE, COLLECT, OPEN_SLOTS = range(8)
_NAMES: Final = ("barrier", "sum_slots", "sum", "gather", "broadcast", "leave", "collect", "open_slots")
Posted = tuple[int, int, int, int]


def describe_call(posted: Posted) -> str:
    """Return a description of a posted call.

    Args:
        posted: the kind plus 256 times the root, a count, and the dtype's name as two 64-bit integers.

    Example:
        >>> describe_call((GATHER, 12, 0, 0))
        'gather'
    """
    kind, count, *dtype_words = posted
    root, kind = divmod(kind, 256)
    name = _NAMES[kind] if kind < len(_NAMES) else "an unknown call"
    if kind in (BARRIER, GATHER, LEAVE):
        return name
    if kind == COLLECT:
        return f"{name} at rank {root}"
    text = f"{name} of {count:,} {dtype_name((dtype_words[0], dtype_words[1]))}"
    return f"{text} from rank {root}" if kind == BROADCAST else text


def describe_difference(reporter: str, calls: list[Posted], activity_of: Callable[[int], str] = lambda _: "") -> str:
    """Return an error message if the ranks' calls differ, else ``""``.

    The lengths of a gather or a collect may differ.

    Args:
        reporter: str. The rank and host that report the difference.
        calls: the posted call of each rank.
        activity_of: returns the activity that a rank has set, or "".

    Example:
        >>> describe_difference("rank 0", [(BARRIER, 0, 0, 0), (BARRIER, 0, 0, 0)])
        ''
    """
    lengths_differ = calls[0][0] % 256 in (GATHER, COLLECT)
    if all(call == calls[0] or (lengths_differ and call[0] == calls[0][0]) for call in calls):
        return ""
    activities = [activity_of(rank) for rank in range(len(calls))]
    descriptions = "; ".join(
        f"rank {rank}: {describe_call(call)}{', for ' if activities[rank] else ''}{activities[rank]}"
        for rank, call in enumerate(calls)
    )
    return (
        f"{reporter}: the ranks do not make the same call, so nothing was done. {descriptions}. "
        "Every rank must call with the same count and dtype in the same order."
    )
