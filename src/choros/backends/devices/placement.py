"""The devices that hold a model's variables and the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VariablePlacement:
    """A variable and the devices that have it; each has the whole variable.

    Attributes:
        path: str. Keras' path of the variable.
        shape: tuple of int.
        devices: tuple of str. Names in Keras' form.
    """

    path: str
    shape: tuple[int, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True)
class RowShard:
    """The rows of a batch that one device has: ``start`` to ``stop - 1``; none if they are equal."""

    start: int
    stop: int
    device: str


@dataclass(frozen=True)
class Placement:
    """The devices of all variables of a model and of the rows of a batch. ``str`` gives a line for each.

    Attributes:
        variables: tuple of VariablePlacement, of the model and of its optimizer.
        shards: tuple of RowShard, in the order of rows.

    Example:
        >>> held = VariablePlacement("dense/kernel", (8, 2), ("cpu:0", "cpu:1"))
        >>> print(Placement((held,), (RowShard(0, 1, "cpu:0"), RowShard(1, 1, "cpu:1"))))
        variable dense/kernel, shape (8, 2): cpu:0, cpu:1
        rows 0 to 0 of 1: cpu:0
        no rows of 1: cpu:1
    """

    variables: tuple[VariablePlacement, ...]
    shards: tuple[RowShard, ...]

    def __str__(self) -> str:
        lines = [f"variable {held.path}, shape {held.shape}: {', '.join(held.devices)}" for held in self.variables]
        rows = max(shard.stop for shard in self.shards)
        for shard in self.shards:
            part = f"rows {shard.start} to {shard.stop - 1}" if shard.stop > shard.start else "no rows"
            lines.append(f"{part} of {rows}: {shard.device}")
        return "\n".join(lines)
