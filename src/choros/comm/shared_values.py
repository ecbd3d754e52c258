"""Exchange of small values among ranks: plain JSON, or messages of ``choros.comm.messages`` with checked fields."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from choros.comm.group import Group
from choros.comm.messages import decode, header_of

_T = TypeVar("_T")


def gather_values(group: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. Collective.

    Args:
        group: Group.
        value: plain JSON. Its numbers may be NaN or infinite. Numbers of NumPy become floats.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> gather_values(SingleRankGroup(), {"rows": 3})
        [{'rows': 3}]
    """
    return [json.loads(text) for text in group.gather(_encoded(value))]


def share_value(group: Group, value: Any) -> Any:
    """Return the value of rank 0. Collective.

    Args:
        group: Group.
        value: as for ``gather_values``. That of other ranks is not read.
    """
    return json.loads(group.gather(_encoded(value))[0])


def gather_messages(group: Group, message: _T) -> list[_T]:
    """Return the messages of all ranks, in the order of the ranks. Collective.

    Args:
        group: Group.
        message: a dataclass without arrays, of the same class on all ranks.

    Raises:
        InvalidInputError: a rank sent another message.
    """
    return [decode(type(message), header) for header in gather_values(group, header_of(message))]


def share_message(group: Group, message: _T) -> _T:
    """Return the message of rank 0. Collective.

    Args:
        group: Group.
        message: a dataclass without arrays, of the same class on all ranks. That of other ranks is not read.

    Raises:
        InvalidInputError: rank 0 sent another message.
    """
    return decode(type(message), share_value(group, header_of(message)))


def _encoded(value: Any) -> bytes:
    return json.dumps(value, default=float).encode()
