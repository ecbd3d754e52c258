"""A look, before ranks train, at which of them compute on the same GPU."""

from __future__ import annotations

import json
import os
import platform

from choros.device_choice import OWN, SHARE, own_gpu
from choros.errors import BadInput
from choros.transport import Group
from choros.transport.peers import machine


def check_gpus_apart(group: Group) -> None:
    """Refuse ranks of one host that compute on the same GPU, unless that was asked for; all ranks call.

    A rank alone cannot know: it may see one GPU because the host has no other, or because its launcher shows it one.

    Raises:
        BadInput: on every rank; names the ranks, the host and the GPU.
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
            here = [number for number, fact in enumerate(facts) if fact[0] == where]
            gpus = len({fact[1] for fact in facts if fact[0] == where})
            raise BadInput(
                f"Ranks {', '.join(map(str, ranks))} on {host} compute on the same GPU ({used}): {len(here)} ranks run "
                f"there on {gpus} GPU{'s' if gpus > 1 else ''}, and would wait for each other. Start one rank for each "
                f"GPU, or give each rank one of its own (srun --gpus-per-task=1; with several each, {OWN}=1). To share "
                f"GPUs all the same: choros run --share-gpus, or {SHARE}=1. To train on the CPU: set "
                "CUDA_VISIBLE_DEVICES to nothing."
            )
