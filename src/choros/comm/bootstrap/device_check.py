"""Check before training that no two ranks use the same GPU."""

from __future__ import annotations

import json
import os
import platform

from choros.comm.group import Group
from choros.comm.host_identity import machine
from choros.device_choice import OWN, SHARE, gpu_variable, own_gpu
from choros.errors import InvalidInputError


def check_gpus_apart(group: Group) -> None:
    """Refuse ranks of one host that compute on the same GPU, unless the user allowed it. All ranks call this.

    A rank alone cannot check it: it may see one GPU because the host has one, or because its launcher shows it one.

    Raises:
        InvalidInputError: on every rank. The message names the ranks, the host and the GPU.
    """
    gpu = "" if os.environ.get(SHARE) else own_gpu()
    facts = [json.loads(text) for text in group.gather(json.dumps([machine(), gpu, platform.node()]).encode())]
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (where, used, _) in enumerate(facts):
        if used:
            users.setdefault((where, used), []).append(rank)
    for (where, used), ranks in users.items():
        if len(ranks) > 1:
            host = facts[ranks[0]][2]
            used_here = [fact[1] for fact in facts if fact[0] == where and fact[1]]  # "" is a rank without a GPU
            gpus = len(set(used_here))
            raise InvalidInputError(
                f"Ranks {', '.join(map(str, ranks))} on {host} compute on the same GPU ({used}): {len(used_here)} "
                f"ranks run there on {gpus} GPU{'s' if gpus > 1 else ''}, and would wait for each other. Start one "
                "rank for each GPU, or show each rank its own GPU (srun --gpus-per-task=1; with several GPUs each, "
                f"{OWN}=1). To share GPUs: choros run --share-gpus, or {SHARE}=1. To train on the CPU: set "
                f"{gpu_variable()} to nothing."
            )
