"""The checkpointed state of a run: metadata and arrays of each rank, for files and for messages."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from choros.backends.replica_state import Groups
from choros.types import Array, dtype_of

Part = tuple[dict[str, Any], Groups]
_LENGTH, _ALIGNED = struct.Struct("<Q"), 64  # the header's length; alignment of the first array, in bytes


@dataclass
class Snapshot:
    """The state of all ranks at one place of a run.

    Attributes:
        facts: dict. Metadata of the run: "epoch" and "batch" to resume at, and "over" if callbacks have ended it.
        parts: dict. The state of each rank, by rank. Rank 0 also holds the arrays that all ranks share.
    """

    facts: dict[str, Any]
    parts: dict[int, Part] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Part:
        """Return a rank's state. The groups "model" and "meeting" are rank 0's if the rank has saved none."""
        facts, groups = self.parts[rank]
        shared = {name: arrays for name, arrays in self.parts[0][1].items() if name in ("model", "meeting")}
        return facts, {**shared, **groups}

    def flat(self) -> tuple[dict[str, Any], list[Array]]:
        """Return the state as metadata and a flat list of arrays."""
        heads, arrays = [], []
        for rank in sorted(self.parts):
            head, rank_arrays = flat(self.parts[rank])
            heads.append({**head, "rank": rank})
            arrays += rank_arrays
        return {**self.facts, "ranks": heads}, arrays

    @classmethod
    def of(cls, facts: dict[str, Any], arrays: list[Array]) -> Snapshot:
        """Return the state of which ``flat`` returned the metadata and arrays."""
        parts, remaining = {}, list(arrays)
        for index, entry in enumerate(facts["ranks"]):
            head = dict(entry)
            rank = head.pop("rank", index)  # files of earlier versions have no rank
            count = sum(count for _, count in head["groups"])
            parts[rank] = nested(head, remaining[:count])
            remaining = remaining[count:]
        return cls({name: value for name, value in facts.items() if name != "ranks"}, parts)


def flat(part: Part) -> tuple[dict[str, Any], list[Array]]:
    """Return a rank's state as metadata and a list of arrays.

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
    """Return the rank's state that ``flat`` flattened."""
    groups, remaining = {}, list(arrays)
    for name, count in head["groups"]:
        groups[name], remaining = remaining[:count], remaining[count:]
    return {name: value for name, value in head.items() if name != "groups"}, groups


def to_blobs(part: Part) -> tuple[dict[str, Any], list[Any]]:
    """Return a rank's state as JSON and byte buffers, for another process."""
    head, arrays = flat(part)
    return {**head, "kinds": kinds_of(arrays)}, raw(arrays)


def kinds_of(arrays: list[Array]) -> list[Any]:
    """Return the types and shapes of arrays, as JSON."""
    return [[array.dtype.name, list(array.shape)] for array in arrays]


def raw(arrays: list[Array]) -> list[Any]:
    """Return the arrays as flat uint8 arrays."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def read_raw(blobs: list[Any], kinds: list[Any]) -> list[Array]:
    """Return the arrays from the bytes of ``raw`` and the types of ``kinds_of``, as views of the bytes."""
    return [
        np.frombuffer(blob, np.uint8).view(dtype_of(kind)).reshape(shape)
        for blob, (kind, shape) in zip(blobs, kinds, strict=True)
    ]


def cut(data: Array, head: dict[str, Any]) -> list[Array]:
    """Split concatenated buffers of ``to_blobs`` again, by the types and shapes in ``head``."""
    if not head["kinds"]:
        return []
    ends = np.cumsum([dtype_of(kind).itemsize * int(np.prod(shape)) for kind, shape in head["kinds"]], dtype=int)
    return np.split(data[: ends[-1]], ends[:-1])


def from_blobs(head: dict[str, Any], blobs: list[Any]) -> Part:
    """Return the rank's state that ``to_blobs`` packed; its arrays are views of the buffers."""
    arrays = read_raw(blobs, head["kinds"])
    return nested({name: value for name, value in head.items() if name != "kinds"}, arrays)


def packed(part: Part) -> Array:
    """Return a rank's state as flat bytes: the header's length, the header as JSON, the arrays.

    Example:
        >>> facts, groups = unpacked(packed(({"epoch": 1}, {"model": [np.arange(3.0)]})))
        >>> facts, groups
        ({'epoch': 1}, {'model': [array([0., 1., 2.])]})
        >>> unpacked(packed(({"epoch": 1}, {})))
        ({'epoch': 1}, {})
        >>> Snapshot.of(*Snapshot({}, {0: ({}, {}), 2: ({"epoch": 1}, {})}).flat()).parts
        {0: ({}, {}), 2: ({'epoch': 1}, {})}
    """
    head, blobs = to_blobs(part)
    text = json.dumps(head).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    return np.concatenate([np.frombuffer(_LENGTH.pack(len(text)) + text, np.uint8), *blobs])


def unpacked(data: Array) -> Part:
    """Return the rank's state that ``packed`` serialized; its arrays are views of the bytes."""
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    end = _LENGTH.size + length
    head = json.loads(data[_LENGTH.size : end].tobytes())
    return from_blobs(head, cut(data[end:], head))
