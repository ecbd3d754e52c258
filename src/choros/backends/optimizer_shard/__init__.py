"""Division of the optimizer's update among the ranks of a host, on weights that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from choros.backends.optimizer_shard.obstacles import obstacle

if TYPE_CHECKING:
    from choros.backends.optimizer_shard.shard import OptimizerShard

__all__ = ["make_shard", "obstacle", "pays"]

_LEAST = 1 << 20  # bytes of weights from which on a divided update takes less time


def pays(replica: Any) -> bool:
    """Return whether a divided update takes less time, as far as measured (``benchmarks/reports/speed.md``)."""
    saves_time = type(replica).__name__ != "TensorFlowReplica"  # there it saves memory only
    return bool(saves_time and replica.size * replica.dtype.itemsize >= _LEAST)


def make_shard(replica: Any, rank: int, size: int, tries: bool = False) -> OptimizerShard | None:
    """Return a rank's share of the update of its replica's optimizer; None if the update cannot be divided.

    Args:
        replica: the built replica of this rank.
        rank: int. This rank, among those of its host.
        size: int. Number of these ranks.
        tries: whether a trial may show that an optimizer of the user can be divided.
    """
    kind = type(replica).__name__
    if kind not in ("JaxReplica", "TensorFlowReplica", "TorchReplica") or replica.repeats:
        return None
    shard_class = _shard_class(kind)
    if not shard_class.on_host(replica) or obstacle(replica.model, tries):
        return None
    idle: OptimizerShard | None = replica.idle_shard
    if idle is not None and idle.fits(rank, size) and not replica.altered:
        return idle
    if idle is not None:
        idle.close()
    shard = shard_class(replica, rank, size, tries)
    return shard if shard.keeps_scalars_equal else None


def _shard_class(kind: str) -> type[OptimizerShard]:
    if kind == "JaxReplica":
        from choros.backends.optimizer_shard.jax import JaxOptimizerShard

        return JaxOptimizerShard
    if kind == "TensorFlowReplica":
        from choros.backends.optimizer_shard.tensorflow import TensorFlowOptimizerShard

        return TensorFlowOptimizerShard
    from choros.backends.optimizer_shard.torch import TorchOptimizerShard

    return TorchOptimizerShard
