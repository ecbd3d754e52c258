"""The state of a run: what each rank left at one place, as facts and arrays that a file or a line can carry."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from choros.backend.state import Groups
from choros.types import Array, dtype_of

Part = tuple[dict[str, Any], Groups]
_LENGTH, _ALIGNED = struct.Struct("<Q"), 64  # of the head; bytes at whose multiple the arrays begin


@dataclass
class State:
    """The state of all ranks at one place of a run.

    Attributes:
        facts: dict. Of the whole run: "epoch" and "batch" to go on with, "over" where callbacks have ended it.
        parts: by rank, what it left. What all ranks share is in the first rank's.
    """

    facts: dict[str, Any]
    parts: dict[int, Part] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Part:
        """Return what a rank goes on from: its own part, and of the first one's what it has not itself."""
        facts, groups = self.parts[rank]
        shared = {name: arrays for name, arrays in self.parts[0][1].items() if name in ("model", "meeting")}
        return facts, {**shared, **groups}

    def flat(self) -> tuple[dict[str, Any], list[Array]]:
        """Return it as facts and a list of arrays."""
        heads, arrays = [], []
        for rank in sorted(self.parts):
            head, own = flat(self.parts[rank])
            heads.append(head)
            arrays += own
        return {**self.facts, "ranks": heads}, arrays

    @classmethod
    def of(cls, facts: dict[str, Any], arrays: list[Array]) -> State:
        """Make it of what ``flat`` returned."""
        parts, rest = {}, list(arrays)
        for rank, head in enumerate(facts["ranks"]):
            count = sum(count for _, count in head["groups"])
            parts[rank] = nested(head, rest[:count])
            rest = rest[count:]
        return cls({name: value for name, value in facts.items() if name != "ranks"}, parts)


def flat(part: Part) -> tuple[dict[str, Any], list[Array]]:
    """Return a rank's part as facts and a list of arrays.

    Example:
        >>> head, arrays = flat(({"epoch": 1}, {"model": [np.zeros(2)], "metrics": []}))
        >>> head, len(arrays)
        ({'epoch': 1, 'groups': [('model', 1), ('metrics', 0)]}, 1)
        >>> sorted(nested(head, arrays)[1])
        ['metrics', 'model']
    """
    facts, groups = part
    counts = [(name, len(arrays)) for name, arrays in groups.items()]
    return {**facts, "groups": counts}, [array for arrays in groups.values() for array in arrays]


def nested(head: dict[str, Any], arrays: list[Array]) -> Part:
    """Return the part that ``flat`` took apart."""
    groups, rest = {}, list(arrays)
    for name, count in head["groups"]:
        groups[name], rest = rest[:count], rest[count:]
    return {name: value for name, value in head.items() if name != "groups"}, groups


def to_blobs(part: Part) -> tuple[dict[str, Any], list[Any]]:
    """Return a part as JSON and buffers, for a line to another process."""
    head, arrays = flat(part)
    return {**head, "kinds": kinds_of(arrays)}, raw(arrays)


def kinds_of(arrays: list[Array]) -> list[Any]:
    """Return the types and shapes of arrays, as JSON."""
    return [[array.dtype.name, list(array.shape)] for array in arrays]


def raw(arrays: list[Array]) -> list[Any]:
    """Return the bytes of arrays."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def read_raw(blobs: list[Any], kinds: list[Any]) -> list[Array]:
    """Return the arrays of which ``raw`` and ``kinds_of`` told; they are views of the buffers."""
    return [
        np.frombuffer(blob, np.uint8).view(dtype_of(kind)).reshape(shape)
        for blob, (kind, shape) in zip(blobs, kinds, strict=True)
    ]


def cut(whole: Array, head: dict[str, Any]) -> list[Array]:
    """Return the buffers that ``to_blobs`` gave, of which one was made by putting them one after the other."""
    ends = np.cumsum([dtype_of(kind).itemsize * int(np.prod(shape)) for kind, shape in head["kinds"]], dtype=int)
    return np.split(whole[: ends[-1] if len(ends) else 0], ends[:-1])


def from_blobs(head: dict[str, Any], blobs: list[Any]) -> Part:
    """Return the part that ``to_blobs`` took apart; its arrays are views of the buffers."""
    arrays = read_raw(blobs, head["kinds"])
    return nested({name: value for name, value in head.items() if name != "kinds"}, arrays)


def packed(part: Part) -> Array:
    """Return a part as flat bytes: the length of its head, the head as JSON, the arrays.

    Example:
        >>> facts, groups = unpacked(packed(({"epoch": 1}, {"model": [np.arange(3.0)]})))
        >>> facts, groups
        ({'epoch': 1}, {'model': [array([0., 1., 2.])]})
    """
    head, blobs = to_blobs(part)
    text = json.dumps(head).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    return np.concatenate([np.frombuffer(_LENGTH.pack(len(text)) + text, np.uint8), *blobs])


def unpacked(whole: Array) -> Part:
    """Return the part that ``packed`` took; its arrays are views of the bytes."""
    (length,) = _LENGTH.unpack(whole[: _LENGTH.size].tobytes())
    end = _LENGTH.size + length
    head = json.loads(whole[_LENGTH.size : end].tobytes())
    return from_blobs(head, cut(whole[end:], head))
