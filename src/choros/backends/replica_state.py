"""Save and restore the complete state of a replica bit for bit, to continue training in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from choros.types import Array

if TYPE_CHECKING:
    from choros.backends.base import BaseReplica

Groups = dict[str, list[Array]]


def take(replica: BaseReplica, whole: bool, ahead: bool) -> tuple[dict[str, Any], Groups]:
    """Return a copy of a replica's state.

    Args:
        replica: a replica of one model.
        whole: True to include weights and optimizer. If False, only state that differs by rank is returned: random
            state, moving statistics, counters, metrics.
        ahead: whether the replica trains at a look-ahead point, which is then included.

    Returns:
        A dict for JSON, and groups of arrays: "model" (as ``snapshot``) or "local", "metrics", "generators" (global
        random state of the framework), "ahead".
    """
    groups = {"metrics": _copies(replica, replica.metric_variables), "generators": replica.generators()}
    if whole:
        groups["model"] = replica.snapshot()
    else:
        groups["local"] = _copies(replica, list(replica.model.non_trainable_variables))
    if ahead:
        groups["ahead"] = _copies(replica, replica.trainable)
    facts = {
        "rows": int(replica._rows),
        "trained": [float(value) for value in replica._trained],
        "step_logs_loss": bool(replica._step_logs_loss),
        "by_batch": bool(replica._by_batch),
    }
    return facts, groups


def put(replica: BaseReplica, facts: dict[str, Any], groups: Groups) -> None:
    """Restore a state that ``take`` returned.

    Args:
        replica: a replica of the same model.
        facts: the dict that ``take`` returned.
        groups: the groups of arrays that ``take`` returned. "model" may come from another rank with equal weights.
    """
    if "model" in groups:
        replica.restore(groups["model"])
    if "local" in groups:
        replica._assign(list(replica.model.non_trainable_variables), groups["local"])
    if "ahead" in groups:
        replica._assign(replica.trainable, groups["ahead"])
    replica._assign(replica.metric_variables, groups["metrics"])
    replica.set_generators(groups["generators"])
    replica._rows, replica._trained = facts["rows"], list(facts["trained"])
    replica._step_logs_loss, replica._by_batch = facts["step_logs_loss"], facts["by_batch"]


def _copies(replica: BaseReplica, variables: list[Any]) -> list[Array]:
    return [np.array(value) for value in replica._values(variables)]
