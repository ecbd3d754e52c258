"""``jax.distributed``, told everything that it would else guess."""

from __future__ import annotations

from typing import Any

from choros.cluster import Place


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start it, where the group that the ranks meet in has not done so (``CHOROS_COMM=jax``).

    Args:
        first: ``address:port`` of rank 0, which serves there.
        place: this rank's.
        timeout: seconds to wait for all.
        options: of ``jax.distributed.initialize``.
    """
    from choros.comm.offload import jax

    jax.start(first, place.rank, place.size, timeout, **options)
