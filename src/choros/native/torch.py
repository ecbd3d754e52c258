"""Start of ``torch.distributed`` with all arguments given, so that its detection is not used."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from choros.cluster import Place


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start ``torch.distributed``.

    Args:
        first: ``address:port`` on which rank 0 serves.
        place: this rank's place.
        timeout: seconds after which the process group's calls fail.
        options: arguments of ``torch.distributed.init_process_group``. ``backend`` defaults to "nccl" if PyTorch has a
            GPU, else to "gloo".
    """
    import torch
    from torch import distributed

    default = {"backend": "nccl" if torch.cuda.is_available() else "gloo", "timeout": timedelta(seconds=timeout)}
    distributed.init_process_group(
        init_method=f"tcp://{first}", rank=place.rank, world_size=place.size, **{**default, **options}
    )
