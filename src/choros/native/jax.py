"""``jax.distributed``, told everything that it would else guess."""

from __future__ import annotations

from typing import Any

from choros.cluster import Place


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start it.

    Args:
        first: ``address:port`` of rank 0, which serves there.
        place: this rank's.
        timeout: seconds to wait for all.
        options: of ``jax.distributed.initialize``.
    """
    import jax

    jax.distributed.initialize(
        first, place.size, place.rank, **{"initialization_timeout": max(1, int(timeout)), **options}
    )
