"""Comparison of the ranks' models and settings before ``fit`` begins, by one small all-gather."""

from __future__ import annotations

import logging
import math
import platform
from typing import Any

import keras

from choros.comm.collectives import Collectives
from choros.consistency.rank_agreement import difference, facts_of_model
from choros.errors import RankMismatchError

logger = logging.getLogger(__name__)

_warned: list[bool] = []


def compare(model: keras.Model, call: dict[str, Any], calls: Collectives) -> None:
    """Check that all ranks will train the same model with the same settings, in epochs of equal length.

    Learning rates, callbacks and validation data may differ and are not compared. If the ranks run different scripts,
    the first rank prints a warning.

    Args:
        model: a compiled model; variables are compared if both ranks' models are built.
        call: the arguments of ``fit`` by name.
        calls: the collectives of the ranks that train.

    Raises:
        RankMismatchError: on every rank; names the rank, the host and the difference.
    """
    built = all(layer.built for layer in model._flatten_layers())
    local_facts = {**facts_of_model(model), "batches": batches(call), "built": built, "host": platform.node()}

    def gather(facts: object) -> list[Any]:
        return calls.allgather_object(facts, name="what fit was given")

    all_facts = gather(local_facts)
    unknown = ["batches"] if any(other["batches"] is None for other in all_facts) else []
    if problem := difference(all_facts, model, gather, calls.ranks, ["script", *unknown]):
        raise RankMismatchError(
            f"{problem} Nothing was trained. Build and compile the same model on every rank, with the same libraries, "
            "and give each the same number of batches (hvd.shard divides rows exactly); only weights may differ, where "
            "a broadcast makes them equal."
        )
    others = [
        rank for rank, other in zip(calls.ranks, all_facts, strict=True) if other["script"] != all_facts[0]["script"]
    ]
    if others and not (calls.rank or _warned):
        _warned.append(True)
        logger.warning(
            f"ranks {others} run another script than rank {calls.ranks[0]}, or another version of it; their "
            "models and settings are the same, so training continues. This warning appears once."
        )


def batches(call: dict[str, Any]) -> int | None:
    """Return the number of batches of an epoch; None if the arguments of ``fit`` do not give it without reading data.

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
        train_rows = math.floor(rows.pop() * (1 - (call.get("validation_split") or 0.0)))
        return None if rows else math.ceil(train_rows / (call.get("batch_size") or 32))
    except Exception:  # data of another type, or data that fit itself will refuse
        return None
