"""The vendor of the GPUs that the installed build of a backend can use, read from its files without an import."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

NVIDIA, AMD, INTEL = "nvidia", "amd", "intel"
JAX_PLATFORM_NAMES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")  # they limit JAX to platforms; the second is deprecated
_CUDNN = "libcudnn.so*"  # TensorFlow registers no GPU without this library


def gpu_vendor(backend: str, environ: Mapping[str, str] | None = None) -> str:
    """Return "nvidia", "amd" or "intel", or "" if the build computes on CPUs only or is not installed.

    JAX finds GPUs through plug-ins in the folder ``jax_plugins``, which ``jax[cuda13]`` and similar extras install.
    PyTorch names its platform in ``torch/version.py``. TensorFlow names it in ``build_info.py``, and needs NVIDIA's
    libraries, which ``tensorflow[and-cuda]`` installs as packages.

    Args:
        backend: "jax", "torch" or "tensorflow".
        environ: an environment. Defaults to ``os.environ``.

    Example:
        >>> gpu_vendor("jax", {"JAX_PLATFORMS": "cpu"})
        ''
    """
    environ = os.environ if environ is None else environ
    known = {"jax": _of_jax, "torch": _of_torch, "tensorflow": _of_tensorflow}
    return known[backend](environ) if backend in known else ""


def _of_jax(environ: Mapping[str, str]) -> str:
    requested = " ".join(environ.get(name, "") for name in JAX_PLATFORM_NAMES).lower().strip()
    names = [path.name for folder in _folders("jax_plugins") if folder.is_dir() for path in folder.iterdir()]
    for mark, vendor in (("cuda", NVIDIA), ("rocm", AMD)):
        if any(mark in name for name in names) and (not requested or mark in requested or "gpu" in requested):
            return vendor
    return ""


def _of_torch(environ: Mapping[str, str]) -> str:
    text = _text("torch", "version.py")
    built = {name for name in ("cuda", "hip", "xpu") if re.search(rf"^{name}\b[^=]*= *['\"]", text, re.MULTILINE)}
    return NVIDIA if "cuda" in built else AMD if "hip" in built else INTEL if "xpu" in built else ""


def _of_tensorflow(environ: Mapping[str, str]) -> str:
    text = _text("tensorflow", "python/platform/build_info.py")
    if "('is_rocm_build', True)" in text:
        return AMD
    return NVIDIA if "('is_cuda_build', True)" in text and _has_cudnn(environ) else ""


def _has_cudnn(environ: Mapping[str, str]) -> bool:
    packages = [folder / "cudnn" / "lib" for folder in _folders("nvidia")]
    folders = [*packages, *(Path(name) for name in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name)]
    return any(any(folder.glob(_CUDNN)) for folder in folders) or find_library("cudnn") is not None


def _folders(package: str) -> list[Path]:
    """Return the folders of a namespace package, which several distributions share."""
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _text(package: str, name: str) -> str:
    """Return the text of a file of a package, or "" if there is none."""
    try:
        spec = importlib.util.find_spec(package)
        return "" if spec is None or not spec.origin else (Path(spec.origin).parent / name).read_text()
    except (OSError, ValueError):  # ValueError: sys.modules has a module without a spec
        return ""
