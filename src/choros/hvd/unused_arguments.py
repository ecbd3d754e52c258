"""The warning about arguments of Horovod that have no effect here."""

from __future__ import annotations

from choros.cluster import Place
from choros.errors import warn_without_effect

ONE_SUM = "all gradients are summed at once on the host, as one dense vector in float32 or wider"
ON_HOST = "values are exchanged on the host"


def warn_of_unused(owner: str, reason: str, /, **given: object) -> None:
    """Warn once, on rank 0, of arguments that were given and have no effect.

    Args:
        owner: str. The function or class of ``choros.hvd``.
        reason: str. The reason.
        **given: for each argument, whether a value was given that asks for an effect.

    Example:
        >>> warn_of_unused("allreduce", ONE_SUM, device_dense="")
    """
    if any(given.values()) and Place.here().rank == 0:
        warn_without_effect(f"hvd.{owner}", reason, **given)
