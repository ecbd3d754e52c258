"""Start of ``jax.distributed`` with all arguments given, so that its detection is not used."""

from __future__ import annotations

from typing import Any

from choros.cluster import Place


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start ``jax.distributed``, unless the ranks' group has started it already (``CHOROS_COMM=jax``).

    Args:
        first: ``address:port`` on which rank 0 serves.
        place: this rank's place.
        timeout: seconds to wait for all ranks.
        options: arguments of ``jax.distributed.initialize``.
    """
    from choros.comm.offload import jax

    jax.start(first, place.rank, place.size, timeout, **options)
