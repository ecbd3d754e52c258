"""A rank's description of the call that it makes, so that ranks whose calls differ get an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from choros.comm.dtypes import dtype_name

BARRIER, SUM_SLOTS, SUM, GATHER, BROADCAST, LEAVE, COLLECT = range(7)
_NAMES: Final = ("barrier", "sum_slots", "sum", "gather", "broadcast", "leave", "collect")
Posted = tuple[int, int, int, int]


def spell(posted: Posted) -> str:
    """Say in words what a rank posted: the kind (and 256 times the root), a count, a dtype as two words.

    Example:
        >>> spell((GATHER, 12, 0, 0))
        'gather'
    """
    kind, count, *code = posted
    root, kind = divmod(kind, 256)
    name = _NAMES[kind] if kind < len(_NAMES) else "an unknown call"
    if kind in (BARRIER, GATHER, LEAVE):
        return name
    if kind == COLLECT:
        return f"{name} at rank {root}"
    said = f"{name} of {count:,} {dtype_name((code[0], code[1]))}"
    return f"{said} from rank {root}" if kind == BROADCAST else said


def difference(where: str, said: list[Posted], doing: Callable[[int], str] = lambda _: "") -> str:
    """Return why the ranks' calls cannot be made together, or ``""``.

    Lengths of what is gathered or collected may differ.

    Args:
        where: str. Who says it.
        said: what each rank posted.
        doing: what a rank says that its call is for, or "".

    Example:
        >>> difference("rank 0", [(BARRIER, 0, 0, 0), (BARRIER, 0, 0, 0)])
        ''
    """
    lengths_differ = said[0][0] % 256 in (GATHER, COLLECT)
    if all(one == said[0] or (lengths_differ and one[0] == said[0][0]) for one in said):
        return ""
    whys = [doing(rank) for rank in range(len(said))]
    told = "; ".join(f"rank {r}: {spell(one)}{', for ' if whys[r] else ''}{whys[r]}" for r, one in enumerate(said))
    return (
        f"{where}: the ranks do not make the same call, so nothing was done. {told}. "
        "Every rank must call with the same count and dtype in the same order."
    )
