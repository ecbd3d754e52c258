"""The GPUs that this process may use, counted without a framework.

A framework that counts GPUs opens a context on each of them (about 0.5 GB of memory). It is then too late to select
one. Therefore ``nvidia-smi`` is run, or ``/proc`` is read if that program is missing; for AMD ``/sys`` is read. The
visible-devices variables have the meaning in the vendors' documentation: CUDA programming guide ("CUDA environment
variables"), ROCm ("GPU isolation techniques"), and Level Zero (``ZE_AFFINITY_MASK``).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from choros.cluster.hardware.gpu_builds import AMD, INTEL, NVIDIA, gpu_vendor

logger = logging.getLogger(__name__)

GIVEN = "CHOROS_GPUS"  # the number of GPUs of a Trainer's worker
VARIABLE = {NVIDIA: "CUDA_VISIBLE_DEVICES", AMD: "ROCR_VISIBLE_DEVICES", INTEL: "ZE_AFFINITY_MASK"}
# HIP renumbers the GPUs that ROCR_VISIBLE_DEVICES shows. It accepts CUDA's name as an alias of HIP_VISIBLE_DEVICES.
_HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
DEVICE_VARIABLES = tuple(dict.fromkeys((*VARIABLE.values(), *_HIP)))
_PROC, _KFD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")
_QUERY_SECONDS = 60.0  # without persistence mode the driver takes a second or two for each GPU


class Gpu(NamedTuple):
    """A GPU, or a part of one (MIG).

    Attributes:
        name: str. Its name in the visible-devices variable: a number or a UUID.
        identity: str. Its UUID, or "" if that is unknown.
    """

    name: str
    identity: str = ""


def usable_gpus(backend: str, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that the installed build of a backend can use and that the environment makes visible.

    Args:
        backend: "jax", "torch" or "tensorflow".
        environ: an environment. Defaults to ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    vendor = gpu_vendor(backend, environ)
    return visible_gpus(vendor, environ) if vendor else ()


def visible_gpus(vendor: str, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of a vendor that the environment shows to this process, in the order of the variable.

    CUDA gives the fastest GPU the first index; ``nvidia-smi`` orders GPUs by PCI bus. On a machine with several models,
    a GPU that is named by an index therefore has no identity, unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.

    Args:
        vendor: "nvidia", "amd" or "intel". Intel's GPUs are those in ``ZE_AFFINITY_MASK``, as only the driver's library
            can list their tiles.
        environ: an environment. Defaults to ``os.environ``.

    Example:
        >>> visible_gpus("nvidia", {"CUDA_VISIBLE_DEVICES": ""}), visible_gpus("intel", {"ZE_AFFINITY_MASK": "0,1"})
        ((), (Gpu(name='0', identity=''), Gpu(name='1', identity='')))
    """
    environ = os.environ if environ is None else environ
    if vendor == INTEL:
        return tuple(Gpu(entry.strip()) for entry in environ.get(VARIABLE[INTEL], "").split(",") if entry.strip())
    if vendor == NVIDIA:
        machine, same_model = _nvidia(shutil.which("nvidia-smi"))
        if not same_model and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return _shown(machine, environ.get(VARIABLE[NVIDIA]), cuda=True, numbered=False)
        return _shown(machine, environ.get(VARIABLE[NVIDIA]), cuda=True)
    gpus = _shown([[gpu] for gpu in _amd()], environ.get(VARIABLE[AMD]))
    # ROCm 7 documents HIP_VISIBLE_DEVICES first. CUDA's name is read if it is not set.
    hip_value = next((environ[name] for name in _HIP if name in environ), None)
    numbered = _shown([[Gpu(str(number))] for number in range(len(gpus))], hip_value)
    return tuple(gpus[int(gpu.name)] for gpu in numbered)


def count_gpus() -> int:
    """Return the number of NVIDIA and AMD GPUs of this machine, including hidden ones.

    Example:
        >>> count_gpus() >= 0
        True
    """
    return sum(map(len, _nvidia(shutil.which("nvidia-smi"))[0])) + len(_amd())


def showing(vendor: str, gpus: Iterable[Gpu], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return environment variables that make only these GPUs visible to a process.

    Args:
        vendor: "nvidia", "amd" or "intel".
        gpus: GPUs that ``visible_gpus`` returned.
        environ: the environment of the process without these variables. Defaults to ``os.environ``.

    Example:
        >>> showing("nvidia", [Gpu("2"), Gpu("0")], {})
        {'CUDA_VISIBLE_DEVICES': '2,0'}
        >>> showing("amd", [Gpu("3")], {"HIP_VISIBLE_DEVICES": "3"})
        {'ROCR_VISIBLE_DEVICES': '3', 'HIP_VISIBLE_DEVICES': '0'}
    """
    environ = os.environ if environ is None else environ
    names = [gpu.name for gpu in gpus]
    numbers = ",".join(map(str, range(len(names))))
    numbered = {name: numbers for name in _HIP if vendor == AMD and name in environ}
    return {VARIABLE[vendor]: ",".join(names), **numbered}


def _shown(
    machine: Sequence[Sequence[Gpu]], value: str | None, cuda: bool = False, numbered: bool = True
) -> tuple[Gpu, ...]:
    """Return the GPUs that a variable shows: all if it is not set, else those before the first invalid entry.

    Args:
        machine: for each GPU, its parts if it is divided, else the GPU.
        value: the value of the variable; None if it is not set.
        cuda: True if a GPU that is named twice hides all GPUs, as in CUDA. Otherwise it ends the list.
        numbered: whether the numbers in the variable are indices of ``machine``.
    """
    if value is None:
        all_parts = [part for parts in machine for part in parts]
        return tuple(part if numbered or not part.name.isdecimal() else Gpu(part.name) for part in all_parts)
    shown: list[Gpu] = []
    for entry in map(str.strip, value.split(",")):
        gpu = _named(machine, entry, numbered)
        if gpu is None:
            break
        if any(gpu.name == other.name or (gpu.identity and gpu.identity == other.identity) for other in shown):
            return () if cuda else tuple(shown)
        shown.append(gpu)
    return tuple(shown)


def _named(machine: Sequence[Sequence[Gpu]], entry: str, numbered: bool) -> Gpu | None:
    """Return the GPU of one entry of a variable, with the entry as its name; None if there is no such GPU."""
    if entry.isdecimal():
        if int(entry) >= len(machine):
            return None
        return Gpu(entry, machine[int(entry)][0].identity if numbered else "")
    known = [part.identity for parts in machine for part in parts]
    matching = [identity for identity in known if entry and identity.startswith(entry)]
    if len(matching) == 1:
        return Gpu(entry, matching[0])
    # /proc does not list the parts of a GPU.
    unlisted = entry.startswith("MIG-") and known and not any("MIG-" in identity for identity in known)
    return Gpu(entry, entry) if unlisted else None


@lru_cache
def _nvidia(program: str | None) -> tuple[tuple[tuple[Gpu, ...], ...], bool]:
    """Return NVIDIA GPUs by PCI bus, each as its parts if it is divided (MIG), and whether all have one model."""
    if program is None:
        return _nvidia_of_proc()
    try:
        text = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=_QUERY_SECONDS, check=True
        ).stdout
    except subprocess.TimeoutExpired:  # the result is cached, so this is printed once
        logger.warning(
            f"{program} did not answer within {_QUERY_SECONDS:g} s on {os.uname().nodename}, so this process "
            "uses no NVIDIA GPU. Check the driver (dmesg), then start again."
        )
        return (), True
    except (OSError, subprocess.SubprocessError):  # without a driver CUDA has no device either
        return (), True
    machine: list[tuple[Gpu, list[Gpu]]] = []
    models = set()
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+): (.*) \(UUID: ([^)\s]+)\)", line):
            models.add(match[2])
            machine.append((Gpu(match[1], match[3]), []))
        elif machine and (match := re.match(r"\s+MIG .*\(UUID: ([^)\s]+)\)", line)):
            machine[-1][1].append(Gpu(match[1], match[1]))
    return tuple(tuple(parts) or (gpu,) for gpu, parts in machine), len(models) < 2


def _nvidia_of_proc(folder: Path = _PROC) -> tuple[tuple[tuple[Gpu, ...], ...], bool]:
    machine, models = [], set()
    for number, path in enumerate(sorted(folder.glob("*/information"))):
        text = path.read_text(errors="replace")
        match = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", text)
        models.update(re.findall(r"Model:\s*(.+)", text))
        machine.append((Gpu(str(number), match[1] if match else ""),))
    return tuple(machine), len(models) < 2


def _amd(folder: Path = _KFD) -> tuple[Gpu, ...]:
    """Return AMD GPUs in the order of their indices: the nodes of the kernel driver that have compute units."""
    gpus: list[Gpu] = []
    for node in sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            properties = dict(line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines())
        except (OSError, ValueError):  # a control group hides this node
            continue
        if int(properties.get("simd_count", "0")):  # 0: the node of a CPU
            number = int(properties.get("unique_id", "0"))
            gpus.append(Gpu(str(len(gpus)), f"GPU-{number:016x}" if number else ""))
    return tuple(gpus)
