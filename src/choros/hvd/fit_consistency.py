"""Comparison of the ranks before ``fit`` begins: one small gather."""

from __future__ import annotations

import math
import platform
import sys
from typing import Any

import keras

from choros.comm.collectives import Collectives
from choros.consistency.rank_agreement import difference, facts_of_model
from choros.errors import RankMismatchError

_warned: list[bool] = []


def compare(model: Any, call: dict[str, Any], calls: Collectives) -> None:
    """See that all ranks are about to train the same model in the same way, in epochs of equal length.

    Rates, callbacks, validation data and what else belongs to one rank are not compared. Other scripts are warned of.

    Args:
        model: compiled; variables are compared where both ranks' models are built.
        call: what ``fit`` was given, by name.
        calls: of the ranks that train.

    Raises:
        RankMismatchError: on every rank; names rank, host and what differs.
    """
    built = all(layer.built for layer in model._flatten_layers())
    mine = {**facts_of_model(model), "batches": batches(call), "built": built, "host": platform.node()}

    def gather(told: Any) -> list[Any]:
        return calls.allgather_object(told, name="what fit was given")

    said = gather(mine)
    unknown = ["batches"] if any(other["batches"] is None for other in said) else []
    if problem := difference(said, model, gather, calls.ranks, ["script", *unknown]):
        raise RankMismatchError(
            f"{problem} Nothing was trained. Build and compile the same model on every rank, with the same libraries, "
            "and give each the same number of batches (hvd.shard divides rows exactly); only weights may differ, where "
            "a broadcast makes them equal."
        )
    others = [rank for rank, other in zip(calls.ranks, said, strict=True) if other["script"] != said[0]["script"]]
    if others and not (calls.rank or _warned):
        _warned.append(True)
        print(
            f"choros: ranks {others} run another script than rank {calls.ranks[0]}, or another version of it; their "
            "models and settings are the same, so they train. This is said once.",
            file=sys.stderr,
            flush=True,
        )


def batches(call: dict[str, Any]) -> int | None:
    """Return how many batches an epoch has, where what ``fit`` was given tells it before any is read.

    Example:
        >>> import numpy as np
        >>> batches({"x": np.zeros((70, 2)), "validation_split": 0.1}), batches({"x": iter([])})
        (2, None)
    """
    if (steps := call.get("steps_per_epoch")) is not None:
        return steps if isinstance(steps, int) else None
    x = call.get("x")
    try:
        if isinstance(x, keras.utils.PyDataset):
            return None if x.num_batches is None else int(x.num_batches)
        rows = {int(leaf.shape[0]) for leaf in keras.tree.flatten(x)}
        kept = math.floor(rows.pop() * (1 - (call.get("validation_split") or 0.0)))
        return None if rows else math.ceil(kept / (call.get("batch_size") or 32))
    except Exception:  # data of another kind, or such as fit itself will refuse
        return None
