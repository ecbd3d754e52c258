"""The GPU memory and the device of a process, both configured before its backend starts.

JAX allocates three quarters of the memory of a GPU at its first use, TensorFlow nearly all of each GPU. The driver and
its workers share GPUs, so ``import choros`` makes both allocate memory as they need it.

Ranks of a job see all GPUs of their host, as Horovod's scripts expect (``gpus[hvd.local_rank()]``). Each backend
computes on the first one unless another is chosen before it starts, and a model is often built before ``Trainer`` is
called. A rank therefore chooses the device of its local rank as soon as a framework has been imported: a finder in
``sys.meta_path`` sees the import. ``hvd.init()`` and ``Trainer`` choose it for frameworks that were imported earlier.
Nothing here imports a framework.

Before a framework or numpy is imported, the same finder sets the number of threads of a rank
(``choros.cluster.rank_threads``), and lets it keep freed memory (``choros.cluster.hardware.freed_memory``).
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from choros.backend_choice import named_backend

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from choros.cluster import Place

OWN = "CHOROS_OWN_GPUS"  # set if the launcher shows each rank its own GPUs: Choros then chooses none
SHARE = "CHOROS_SHARE_GPUS"  # set to allow several ranks on one GPU, which are refused otherwise
SLOT = "CHOROS_SLOT"  # the slot of a rank of an elastic job on its host: its local rank may change
_ASSIGNED_BY_LAUNCHER = (OWN, "SLURM_GPUS_PER_TASK", "CHOROS_WORKER")
_JAX_MEMORY = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
_CPU_DEVICES = ("cpu", "meta", "mps")  # values of KERAS_TORCH_DEVICE with which Keras uses no GPU counted here
_slot_in_torch: list[int] = []  # the slot whose device was chosen in PyTorch
_JAX_OPTIONS = {"nvidia": "jax_cuda_visible_devices", "amd": "jax_rocm_visible_devices"}


def allocate_as_needed() -> None:
    """Make JAX and TensorFlow allocate GPU memory as they need it, unless the user has set one of their variables.

    Both read these variables at their first use of a GPU, so they may have been imported already.
    """
    if not any(name in os.environ for name in _JAX_MEMORY):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def choose_when_imported() -> None:
    """Choose this rank's device in each imported framework, and in any other one when it is imported."""
    if any(name in sys.modules for name in _MODULES_WITH_THREADS):
        _prepare_quietly()
    if any(name in sys.modules for name in _CHOOSE):
        _choose_quietly()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def choose_device(place: Place | None = None) -> None:
    """Choose the device of this rank in each loaded framework. Choose none if no other rank runs on this host.

    An earlier choice stays: visible devices of JAX and TensorFlow that the user set, or the device that was chosen here
    in PyTorch. If the launcher shows each rank separate GPUs, nothing is chosen.

    Args:
        place: the place of this process. Defaults to the place in its launcher's variables.

    Raises:
        InvalidInputError: a framework has started on another GPU.
    """
    _choose(place)


def prepare_rank(place: Place | None = None) -> None:
    """Set the threads of this rank, and let it keep freed memory. A process without other ranks stays as it is.

    Args:
        place: the place of this process. Defaults to the place in its launcher's variables.

    Raises:
        InvalidInputError: the launcher's variables contradict each other.
    """
    from choros.cluster import Place
    from choros.cluster.hardware.freed_memory import keep_freed_memory
    from choros.cluster.rank_threads import limit_threads

    limit_threads(place)
    if (Place.here() if place is None else place).size > 1:
        keep_freed_memory(one_arena=named_backend()[0] == "jax")


def own_gpu(place: Place | None = None) -> str:
    """Return the UUID of the GPU that this rank computes on, or "" if it has none or the UUID is unknown.

    Args:
        place: the place of this process. Defaults to the place in its launcher's variables.
    """
    from choros.cluster.hardware.gpus import usable_gpus

    backend = named_backend()[0]
    gpus, module = usable_gpus(backend), sys.modules.get(backend)
    if not gpus or _kept_on_cpu(backend, module):
        return ""
    number = _slot(place) or 0
    if module is not None and backend == "jax":
        shown = _visible_in_jax(module)
        number = 0 if shown == "all" else int(shown.partition(",")[0])
    elif module is not None and backend == "torch":
        number = module.cuda.current_device() if module.cuda.is_available() else len(gpus)
    elif module is not None:
        visible = module.config.get_visible_devices("GPU")
        number = int(visible[0].name.rpartition(":")[2]) if visible else len(gpus)
    else:
        number %= len(gpus)
    return gpus[number].identity if number < len(gpus) else ""


def gpu_variable() -> str:
    """Return the visible-devices variable of the GPUs that the installed backend can use."""
    from choros.cluster.hardware.gpu_builds import NVIDIA, gpu_vendor
    from choros.cluster.hardware.gpus import VARIABLE

    return VARIABLE[gpu_vendor(named_backend()[0]) or NVIDIA]


def _kept_on_cpu(backend: str, module: ModuleType | None) -> bool:
    """Return whether a setting that hides no GPU keeps the backend from using one."""
    if backend == "torch":
        return os.environ.get("KERAS_TORCH_DEVICE", "").startswith(_CPU_DEVICES)
    if backend == "jax" and module is not None:
        platforms = str(module.config.jax_platforms or "")
        return bool(platforms) and not any(name in platforms for name in ("cuda", "rocm", "gpu"))
    return False


def _choose(place: Place | None, executed: str = "") -> None:
    """Choose the device of this rank in each framework that is loaded, or whose code has just been executed."""
    slot = _slot(place)
    if slot is None:
        return
    for name, choose in _CHOOSE.items():
        module = sys.modules.get(name)
        # A framework that imports choros while it is itself imported has no functions yet.
        if module is not None and hasattr(module, "__version__") and (name == executed or not _is_importing(module)):
            choose(module, slot)


def _is_importing(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _choose_quietly(executed: str = "") -> None:
    from choros.errors import ChorosError

    # A failure must not end the import: hvd.init() and Trainer raise it again, where the user expects it.
    with contextlib.suppress(ChorosError, RuntimeError):
        _choose(None, executed)


def _prepare_quietly() -> None:
    from choros.errors import ChorosError

    with contextlib.suppress(ChorosError):  # hvd.init() and Trainer raise it again
        prepare_rank()


def _slot(place: Place | None) -> int | None:
    """Return the number of this rank on its host, to be taken modulo the number of GPUs; None to choose no GPU."""
    if any(os.environ.get(name) for name in _ASSIGNED_BY_LAUNCHER):
        return None
    if os.environ.get(SLOT, "").isdecimal():
        return int(os.environ[SLOT])
    if place is None:
        from choros.cluster import Place
        from choros.errors import ChorosError

        try:
            place = Place.here()
        except ChorosError:  # the launcher's variables contradict each other: the code that needs the place reports it
            return None
    return place.local_rank if place.local_size > 1 else None


def _choose_in_jax(jax: ModuleType, slot: int) -> None:
    from choros.cluster.hardware.gpu_builds import NVIDIA
    from choros.cluster.hardware.gpus import VARIABLE, usable_gpus

    gpus, option = usable_gpus("jax"), _jax_option()
    if len(gpus) < 2 or not option or _visible_in_jax(jax) != "all":
        return
    number = slot % len(gpus)
    if number:
        cpus = jax.config.jax_num_cpu_devices
        try:
            jax.config.update("jax_num_cpu_devices", max(cpus, 0) + 1)  # JAX refuses this once it has started
            jax.config.update("jax_num_cpu_devices", cpus)
        except RuntimeError:
            raise _started_error("JAX", number) from None
    if any(gpu.identity.startswith("MIG-") for gpu in gpus):
        # CUDA enumerates one MIG instance, the first that this variable names, so JAX's option cannot choose another.
        os.environ[VARIABLE[NVIDIA]] = gpus[number].name
    else:
        jax.config.update(option, str(number))


def _choose_in_torch(torch: ModuleType, slot: int) -> None:
    # This opens the GPU at once, which is useless if PyTorch only reads data. A second call leaves the choice as it is.
    if _slot_in_torch or named_backend()[0] != "torch":
        return
    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(slot % count)
        _slot_in_torch.append(slot)


def _choose_in_tensorflow(tensorflow: ModuleType, slot: int) -> None:
    gpus = tensorflow.config.list_physical_devices("GPU")
    if len(gpus) < 2 or list(tensorflow.config.get_visible_devices("GPU")) != list(gpus):
        return
    try:
        tensorflow.config.set_visible_devices(gpus[slot % len(gpus)], "GPU")
    except RuntimeError:
        if slot % len(gpus):
            raise _started_error("TensorFlow", slot % len(gpus)) from None


def _jax_option() -> str:
    """Return the name of JAX's option for visible GPUs, "" if the build uses none. JAX has no variable for it."""
    from choros.cluster.hardware.gpu_builds import gpu_vendor

    return _JAX_OPTIONS.get(gpu_vendor("jax"), "")


def _visible_in_jax(jax: ModuleType) -> str:
    option = _jax_option()
    return str(jax.config.read(option)) if option else "all"


def _started_error(name: str, number: int) -> Exception:
    from choros.errors import InvalidInputError

    return InvalidInputError(
        f"{name} had started in process {os.getpid()} on {os.uname().nodename} before its GPU was chosen, so it "
        f"computes on the first one, as other ranks of this host do, and not on GPU {number}. Import choros before "
        f"Keras, call hvd.init() before the first model or array is made, or choose the GPU yourself and set {OWN}=1."
    )


_CHOOSE = {"jax": _choose_in_jax, "torch": _choose_in_torch, "tensorflow": _choose_in_tensorflow}
_MODULES_WITH_THREADS = (*_CHOOSE, "numpy")


class _Finder:
    """A finder for ``sys.meta_path``: it sets this rank's threads, and its loader chooses the device of a framework."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in _MODULES_WITH_THREADS:
            _prepare_quietly()
        if fullname not in _CHOOSE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):  # old finders have only find_module
                continue
            if (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None and _slot(None) is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment] # a loader needs no base class
                return spec
        return None


class _Loader:
    """A loader that calls another loader, and then chooses this rank's device."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _choose_quietly(module.__name__)
