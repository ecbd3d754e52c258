"""The GPUs that this process may use, counted without starting a framework.

A framework that counts GPUs opens a context on each of them (some 0.5 GB of memory) and can no longer be told which to
use. So the driver is asked: ``nvidia-smi``, else ``/proc`` and ``/sys``. The variables that hide GPUs hold as their
vendors document them: CUDA programming guide ("CUDA environment variables"), ROCm ("GPU isolation techniques"), and
Level Zero (``ZE_AFFINITY_MASK``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from choros.machine.gpu_builds import AMD, INTEL, NVIDIA, gpu_vendor

GIVEN = "CHOROS_GPUS"  # tells a Trainer's worker how many GPUs it was given
VARIABLE = {NVIDIA: "CUDA_VISIBLE_DEVICES", AMD: "ROCR_VISIBLE_DEVICES", INTEL: "ZE_AFFINITY_MASK"}
# HIP numbers the GPUs that ROCR_VISIBLE_DEVICES leaves anew, and knows CUDA's name for its own variable.
_HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_PROC, _KFD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")
_PATIENCE = 60.0  # seconds; without its persistence mode the driver takes a second or two for each GPU


class Gpu(NamedTuple):
    """A GPU, or a part of one (MIG).

    Attributes:
        name: str. What the variable of visible devices calls it.
        identity: str. Tells it from all others of the machine; "" where that is not known.
    """

    name: str
    identity: str = ""


def usable_gpus(backend: str, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that the installed build of a backend can use, as far as the environment shows them.

    Args:
        backend: "jax", "torch" or "tensorflow".
        environ: what to read instead of ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    vendor = gpu_vendor(backend, environ)
    return visible_gpus(vendor, environ) if vendor else ()


def visible_gpus(vendor: str, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of a vendor that the environment shows to this process, in the order of its variable.

    Args:
        vendor: "nvidia", "amd" or "intel". Intel's are those that ``ZE_AFFINITY_MASK`` names: nothing else tells their
            tiles apart without the driver's own library.
        environ: what to read instead of ``os.environ``.

    Example:
        >>> visible_gpus("nvidia", {"CUDA_VISIBLE_DEVICES": ""}), visible_gpus("intel", {"ZE_AFFINITY_MASK": "0,1"})
        ((), (Gpu(name='0', identity=''), Gpu(name='1', identity='')))
    """
    environ = os.environ if environ is None else environ
    if vendor == INTEL:
        return tuple(Gpu(word.strip()) for word in environ.get(VARIABLE[INTEL], "").split(",") if word.strip())
    if vendor == NVIDIA:
        return _shown(_nvidia(shutil.which("nvidia-smi")), environ.get(VARIABLE[NVIDIA]))
    gpus = _shown([[gpu] for gpu in _amd()], environ.get(VARIABLE[AMD]))
    # ROCm 7 documents HIP_VISIBLE_DEVICES first; CUDA's name is read where it is not set.
    hidden = next((environ[name] for name in _HIP if name in environ), None)
    numbered = _shown([[Gpu(str(number))] for number in range(len(gpus))], hidden)
    return tuple(gpus[int(gpu.name)] for gpu in numbered)


def count_gpus() -> int:
    """Return how many GPUs of NVIDIA and AMD this machine has, whatever the environment hides.

    Example:
        >>> count_gpus() >= 0
        True
    """
    return sum(map(len, _nvidia(shutil.which("nvidia-smi")))) + len(_amd())


def showing(vendor: str, gpus: Iterable[Gpu], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that show a process these GPUs alone.

    Args:
        vendor: "nvidia", "amd" or "intel".
        gpus: as ``visible_gpus`` returned them.
        environ: the process' environment without these variables, instead of ``os.environ``.

    Example:
        >>> showing("nvidia", [Gpu("2"), Gpu("0")], {})
        {'CUDA_VISIBLE_DEVICES': '2,0'}
        >>> showing("amd", [Gpu("3")], {"HIP_VISIBLE_DEVICES": "3"})
        {'ROCR_VISIBLE_DEVICES': '3', 'HIP_VISIBLE_DEVICES': '0'}
    """
    environ = os.environ if environ is None else environ
    names = [gpu.name for gpu in gpus]
    anew = ",".join(map(str, range(len(names))))
    numbered = {name: anew for name in _HIP if vendor == AMD and name in environ}
    return {VARIABLE[vendor]: ",".join(names), **numbered}


def _shown(machine: Sequence[Sequence[Gpu]], words: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a variable shows: all where it is not set, else those before the first that is not there.

    Args:
        machine: for each GPU, its parts where it is divided, else itself.
        words: the variable's value.
    """
    if words is None:
        return tuple(part for parts in machine for part in parts)
    shown: list[Gpu] = []
    for word in map(str.strip, words.split(",")):
        gpu = _named(machine, word)
        if gpu is None or gpu in shown:
            break
        shown.append(gpu)
    return tuple(shown)


def _named(machine: Sequence[Sequence[Gpu]], word: str) -> Gpu | None:
    """Return the GPU that a word of a variable means, under the name that the word gives it; None where none is."""
    if word.isdecimal():
        return Gpu(word, machine[int(word)][0].identity) if int(word) < len(machine) else None
    known = [part.identity for parts in machine for part in parts]
    meant = [identity for identity in known if word and identity.startswith(word)]
    if len(meant) == 1:
        return Gpu(word, meant[0])
    # /proc tells nothing of parts.
    return Gpu(word, word) if word.startswith("MIG-") and known and not any("MIG-" in one for one in known) else None


@lru_cache
def _nvidia(program: str | None) -> tuple[tuple[Gpu, ...], ...]:
    """Return NVIDIA's GPUs in the order of their numbers, each as its parts where it is divided (MIG)."""
    if program is None:
        return _nvidia_of_proc()
    try:
        text = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no driver runs: CUDA has no device either
        return ()
    machine: list[tuple[Gpu, list[Gpu]]] = []
    for line in text.splitlines():
        if found := re.match(r"GPU (\d+): .*\(UUID: ([^)\s]+)\)", line):
            machine.append((Gpu(found[1], found[2]), []))
        elif machine and (found := re.match(r"\s+MIG .*\(UUID: ([^)\s]+)\)", line)):
            machine[-1][1].append(Gpu(found[1], found[1]))
    return tuple(tuple(parts) or (gpu,) for gpu, parts in machine)


def _nvidia_of_proc(folder: Path = _PROC) -> tuple[tuple[Gpu, ...], ...]:
    machine = []
    for number, path in enumerate(sorted(folder.glob("*/information"))):
        found = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", path.read_text(errors="replace"))
        machine.append((Gpu(str(number), found[1] if found else ""),))
    return tuple(machine)


def _amd(folder: Path = _KFD) -> tuple[Gpu, ...]:
    """Return AMD's GPUs in the order of their numbers: the nodes of the kernel's driver that compute."""
    gpus: list[Gpu] = []
    for node in sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            properties = dict(line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines())
        except (OSError, ValueError):  # a control group hides it
            continue
        if int(properties.get("simd_count", "0")):  # 0 is a processor's node
            number = int(properties.get("unique_id", "0"))
            gpus.append(Gpu(str(len(gpus)), f"GPU-{number:016x}" if number else ""))
    return tuple(gpus)
