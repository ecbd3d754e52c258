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


def warn_of_one_sum(
    owner: str, devices: tuple[str, str], as_dense: bool, predivide_factor: float, num_groups: int, groups: object
) -> None:
    """Warn once, on rank 0, of a wrapper's arguments that say how and where gradients are summed.

    Args:
        owner: str. The wrapper.
        devices: its ``device_dense`` and ``device_sparse``.
        as_dense: its ``sparse_as_dense``.
        predivide_factor: its ``gradient_predivide_factor``.
        num_groups: its ``num_groups``.
        groups: its ``groups``.
    """
    warn_of_unused(
        owner,
        ONE_SUM,
        device_dense=devices[0],
        device_sparse=devices[1],
        sparse_as_dense=as_dense,
        gradient_predivide_factor=predivide_factor != 1.0,
        num_groups=num_groups,
        groups=groups is not None,
    )
