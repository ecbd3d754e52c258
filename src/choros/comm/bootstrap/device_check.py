"""Check before training that no two ranks use the same GPU."""

from __future__ import annotations

import os
import platform

from choros.comm.group import Group
from choros.comm.host_identity import machine
from choros.comm.shared_values import gather_values
from choros.device_choice import OWN, SHARE, gpu_variable, own_gpu
from choros.errors import InvalidInputError, counted


def check_gpus_apart(group: Group) -> None:
    """Refuse ranks of one host that compute on the same GPU, unless the user allowed it. All ranks call this.

    A rank cannot check this alone. It may see one GPU because the host has one, or because its launcher hides the rest.

    Raises:
        InvalidInputError: on every rank. The message names the ranks, the host and the GPU.
    """
    gpu = "" if os.environ.get(SHARE) else own_gpu()
    replies = gather_values(group, [machine(), gpu, platform.node()])
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (machine_name, gpu_name, _) in enumerate(replies):
        if gpu_name:
            users.setdefault((machine_name, gpu_name), []).append(rank)
    for (machine_name, gpu_name), ranks in users.items():
        if len(ranks) > 1:
            host = replies[ranks[0]][2]
            gpu_names = [
                fact[1] for fact in replies if fact[0] == machine_name and fact[1]
            ]  # "" is a rank without a GPU
            gpus = len(set(gpu_names))
            raise InvalidInputError(
                f"Ranks {', '.join(map(str, ranks))} on {host} compute on the same GPU ({gpu_name}): {len(gpu_names)} "
                f"ranks run there on {counted(gpus, 'GPU')}, and would wait for each other. Start one "
                "rank for each GPU, or show each rank its own GPU (srun --gpus-per-task=1; with several GPUs each, "
                f"{OWN}=1). To share GPUs: choros run --share-gpus, or {SHARE}=1. To train on the CPU: set "
                f"{gpu_variable()} to nothing."
            )
