"""Rules about limits of a rank: memory, shared memory, open files; and about GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from choros.launch.process.failure_report import amount
from choros.tools.doctor.facts import Facts
from choros.tools.doctor.findings import ERROR, NEED, WARNING, Finding, Observations, Rule, available_memory, made

_SPACE = 16_000_000_000  # least bytes of address space: the libraries reserve far more than they use
_SHM = 128_000_000  # least bytes of /dev/shm for each rank; the default of a container is 64 MB
_FILES, _FILES_A_RANK = 256, 8


def memory(seen: Observations) -> Iterator[Finding]:
    """Find less memory for each rank than a training needs."""
    peaks = [int(end["peak"]) for ends in seen.smoke.values() for end in ends]
    need = max([NEED // 2 if peaks else NEED, *peaks])
    for some in seen.machines():
        available = available_memory(some)
        space = next((facts for facts in some if facts["memory"]["address_space"] is not None), None)
        if space is not None and space["memory"]["address_space"] < _SPACE:
            yield made(
                ERROR,
                "memory",
                some,
                f"{{at}}: the address space is limited to {amount(space['memory']['address_space'])}, and the "
                "libraries reserve more than that.",
                "ulimit -v unlimited; limit memory by a control group (the batch system's --mem) instead.",
            )
        elif available < need:
            where, remedy = _least(some)
            yield made(
                ERROR,
                "memory",
                some,
                f"{{at}}: {amount(available)} of memory is left for each rank {where}, and a small training takes "
                f"{amount(need)}.",
                remedy,
            )


def _least(some: list[Facts]) -> tuple[str, str]:
    """Return a description of the smallest limit of memory, and advice."""
    memory = some[0]["memory"]
    if memory["limit"] is not None and memory["limit"] - memory["used"] < (memory["available"] or 0):
        return (
            f"by the control group's limit of {amount(memory['limit'])}",
            "Ask for more memory (--mem, resources.limits.memory, docker --memory), or start fewer ranks on a host.",
        )
    return (
        f"on the host, which has {amount(memory['total'] or 0)}",
        "End what else runs there, start fewer ranks on a host, or take hosts with more memory.",
    )


def shared_memory(seen: Observations) -> Iterator[Finding]:
    """Find a small /dev/shm. If it is full, MPI libraries, NCCL and PyTorch's DataLoader end with SIGBUS."""
    for some in seen.machines():
        small = [facts for facts in some if facts["shm"] is not None and facts["shm"]["free"] < _SHM * len(some)]
        if small:
            shm = small[0]["shm"]
            by_mpi = small[0]["engine"] == "MPI"
            yield made(
                ERROR if by_mpi else WARNING,
                "shared-memory",
                small,
                f"{{at}}: /dev/shm has {amount(shm['free'])} free of {amount(shm['total'])}; MPI, NCCL and PyTorch's "
                "DataLoader end by SIGBUS when it is full.",
                "Make it larger: docker --shm-size=2g or --ipc=host, an emptyDir with medium: Memory at /dev/shm, "
                "mount -o remount,size=50% /dev/shm; and remove what earlier jobs left there.",
            )


def open_files(seen: Observations) -> Iterator[Finding]:
    """Find limits of open files that are too low for the number of ranks."""
    need = _FILES + _FILES_A_RANK * seen.size
    few = [facts for facts in seen.ranks if 0 <= facts["files"]["soft"] < need]
    if few:
        files = few[0]["files"]
        free = files["hard"] < 0 or files["hard"] >= need
        hard = "" if free else " (the hard limit must be raised too)"
        yield made(
            ERROR,
            "open-files",
            few,
            f"{{at}}: {files['soft']} open files are allowed, and a job of this size takes {need}.",
            f"ulimit -n {need} in the job script{hard}.",
        )


def devices(seen: Observations) -> Iterator[Finding]:
    """Find a GPU that is assigned to several ranks of a machine."""
    for some in seen.machines():
        for name in dict.fromkeys(name for facts in some for name in facts["devices"]):
            owners: dict[str, list[Facts]] = {}
            for facts in some:
                for device in _devices(facts["devices"].get(name, "")):
                    owners.setdefault(device, []).append(facts)
            shared = {device: ranks for device, ranks in owners.items() if len(ranks) > 1}
            if not shared:
                continue
            ranks: dict[int, Any] = {facts["rank"]: facts for sharing in shared.values() for facts in sharing}
            lists = {facts["devices"].get(name, "") for facts in some}
            if len(lists) == 1 and len(owners) >= len(some):
                continue  # each rank selects the GPU of its local rank (choros.device_choice)
            yield made(
                WARNING if len(owners) >= len(some) else ERROR,
                "devices",
                list(ranks.values()),
                f"{{at}}: {name} gives several ranks the same GPU ({', '.join(list(shared)[:8])})"
                + (", from lists that differ." if len(lists) > 1 else "."),
                "Show each rank one of its own (srun --gpus-per-task=1), or show all ranks the same list with a GPU "
                "for each; to share GPUs all the same: choros run --share-gpus.",
            )


def unseen(seen: Observations) -> Iterator[Finding]:
    """Find GPUs that the backend does not see, for example because its build supports only CPUs."""
    blind = []
    for facts in seen.ranks:
        using = str(facts["backend"]).partition(" ")[0]
        hidden = any(not _devices(value) for value in facts["devices"].values())
        ends = [end for end in seen.smoke.get(facts["rank"], ()) if end["backend"] == using]
        if facts["gpus"] and not hidden and ends and ends[0].get("gpus") == 0:
            blind.append(facts)
    if blind:
        name = str(blind[0]["backend"]).partition(" ")[0]
        yield made(
            WARNING,
            "no-gpu",
            blind,
            f"{{at}}: {name} sees none of the host's {blind[0]['gpus']} GPUs.",
            f"Install {name} with its GPU support (choros[jax-cuda], choros[tensorflow-cuda], a CUDA build of torch), "
            "or set CUDA_VISIBLE_DEVICES= where GPUs are not wanted.",
        )


def _devices(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]


RULES: tuple[Rule, ...] = (memory, shared_memory, open_files, devices, unseen)
