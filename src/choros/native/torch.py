"""``torch.distributed``, told everything that it would else guess."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from choros.cluster import Place


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start it.

    Args:
        first: ``address:port`` of rank 0, which serves there.
        place: this rank's.
        timeout: seconds that its calls wait.
        options: of ``torch.distributed.init_process_group``; ``backend`` is NCCL where there are GPUs, else gloo.
    """
    import torch
    from torch import distributed

    default = {"backend": "nccl" if torch.cuda.is_available() else "gloo", "timeout": timedelta(seconds=timeout)}
    distributed.init_process_group(
        init_method=f"tcp://{first}", rank=place.rank, world_size=place.size, **{**default, **options}
    )
