"""The memory and the device of a process on GPUs, both chosen before its backend starts.

JAX takes three quarters of a GPU's memory when it is first used, TensorFlow nearly all of each GPU. Caller and workers
share GPUs, so ``import choros`` has both take what they need instead.

Ranks of a job see all GPUs of their host, as Horovod's scripts expect (``gpus[hvd.local_rank()]``), and each backend
computes on the first one unless it is told otherwise before it starts. A model is often built before ``Trainer`` is
called. A rank therefore chooses the device of its local rank as soon as a framework has been imported, which a finder
in ``sys.meta_path`` notices; ``hvd.init()`` and ``Trainer`` do it for what was imported earlier. Nothing here imports a
framework.
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

OWN = "CHOROS_OWN_GPUS"  # says that a launcher has shown each rank GPUs of its own, so that none is to be chosen
SHARE = "CHOROS_SHARE_GPUS"  # asks for several ranks on one GPU, which are refused otherwise
SLOT = "CHOROS_SLOT"  # the part of its host that a rank of an elastic job has, where its local rank may change
_GIVEN = (OWN, "SLURM_GPUS_PER_TASK", "CHOROS_WORKER")
_JAX_MEMORY = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
_done: list[int] = []  # what was chosen in PyTorch
_OPTIONS = {"nvidia": "jax_cuda_visible_devices", "amd": "jax_rocm_visible_devices"}


def allocate_as_needed() -> None:
    """Have JAX and TensorFlow take GPU memory as they need it, unless the user has said how they are to take it.

    Both read these variables when they first use a GPU, so it does not matter what is imported already.
    """
    if not any(name in os.environ for name in _JAX_MEMORY):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def choose_when_imported() -> None:
    """Choose this rank's device in the frameworks that are imported already, and in others when they are imported."""
    if any(name in sys.modules for name in _CHOOSE):
        _choose_quietly()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def choose_device(place: Place | None = None) -> None:
    """Choose the device of this rank in each framework that is loaded; in a process alone on its host leave all as is.

    A choice that was made before stays: the user's visible devices of JAX and TensorFlow, PyTorch's current device once
    it was chosen here, and a launcher that shows each rank GPUs of its own.

    Args:
        place: this process's. Defaults to what its launcher tells.

    Raises:
        BadInput: a framework has started on another GPU.
    """
    slot = _slot(place)
    if slot is None:
        return
    for name, choose in _CHOOSE.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):  # else it is being imported
            choose(module, slot)


def own_gpu(place: Place | None = None) -> str:
    """Return what tells the GPU that this rank computes on from all others, "" where there is none or that is unknown.

    Args:
        place: this process's. Defaults to what its launcher tells.
    """
    from choros.machine.gpus import usable_gpus

    backend = named_backend()[0]
    gpus, module = usable_gpus(backend), sys.modules.get(backend)
    if not gpus:
        return ""
    number = _slot(place) or 0
    if module is not None and backend == "jax":
        shown = _shown_to_jax(module)
        number = 0 if shown == "all" else int(shown.partition(",")[0])
    elif module is not None and backend == "torch":
        number = module.cuda.current_device() if module.cuda.is_available() else len(gpus)
    elif module is not None:
        visible = module.config.get_visible_devices("GPU")
        number = int(visible[0].name.rpartition(":")[2]) if visible else len(gpus)
    else:
        number %= len(gpus)
    return gpus[number].identity if number < len(gpus) else ""


def _choose_quietly() -> None:
    from choros.errors import ChorosError

    with contextlib.suppress(ChorosError):  # hvd.init() and Trainer raise it, where the script can be stopped
        choose_device()


def _slot(place: Place | None) -> int | None:
    """Return which of its host's GPUs is this rank's, before it is cut to their number; None where none is chosen."""
    if any(os.environ.get(name) for name in _GIVEN):
        return None
    if os.environ.get(SLOT, "").isdecimal():
        return int(os.environ[SLOT])
    if place is None:
        from choros.cluster import Place
        from choros.errors import ChorosError

        try:
            place = Place.here()
        except ChorosError:  # the launcher's variables contradict each other, which what needs the place reports
            return None
    return place.local_rank if place.local_size > 1 else None


def _choose_in_jax(jax: Any, slot: int) -> None:
    from choros.machine.gpus import usable_gpus

    count, option = len(usable_gpus("jax")), _option()
    if count < 2 or not option or _shown_to_jax(jax) != "all":
        return
    if not slot % count:
        jax.config.update(option, "0")
        return
    cpus = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(cpus, 0) + 1)  # which JAX refuses once it has started
        jax.config.update("jax_num_cpu_devices", cpus)
    except RuntimeError:
        raise _too_late("JAX", slot % count) from None
    jax.config.update(option, str(slot % count))


def _choose_in_torch(torch: Any, slot: int) -> None:
    # It opens the GPU at once, which is for nothing where PyTorch only reads data; a second choice is the script's.
    if _done or named_backend()[0] != "torch":
        return
    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(slot % count)
        _done.append(slot)


def _choose_in_tensorflow(tensorflow: Any, slot: int) -> None:
    gpus = tensorflow.config.list_physical_devices("GPU")
    if len(gpus) < 2 or list(tensorflow.config.get_visible_devices("GPU")) != list(gpus):
        return
    try:
        tensorflow.config.set_visible_devices(gpus[slot % len(gpus)], "GPU")
    except RuntimeError:
        if slot % len(gpus):
            raise _too_late("TensorFlow", slot % len(gpus)) from None


def _option() -> str:
    """Return JAX's option of the GPUs that it uses; it has no variable of that meaning."""
    from choros.machine.gpu_builds import gpu_vendor

    return _OPTIONS.get(gpu_vendor("jax"), "")


def _shown_to_jax(jax: Any) -> str:
    option = _option()
    return str(jax.config.read(option)) if option else "all"


def _too_late(name: str, number: int) -> Exception:
    from choros.errors import BadInput

    return BadInput(
        f"{name} had started in process {os.getpid()} on {os.uname().nodename} before its GPU was chosen, so it "
        f"computes on the first one, as other ranks of this host do, and not on GPU {number}. Import choros before "
        f"Keras, call hvd.init() before the first model or array is made, or choose the GPU yourself and set {OWN}=1."
    )


_CHOOSE = {"jax": _choose_in_jax, "torch": _choose_in_torch, "tensorflow": _choose_in_tensorflow}


class _Finder:
    """A finder for ``sys.meta_path`` that has this rank's device chosen once a framework has been imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _CHOOSE:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None and _slot(None) is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment] # which needs no base class
                return spec
        return None


class _Loader:
    """A loader that lets another one load a framework, and then has this rank's device chosen."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _choose_quietly()
