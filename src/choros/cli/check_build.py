"""``choros run --check-build``: a list of the available features, found without importing a framework."""

from __future__ import annotations

from choros.backend_choice import is_installed
from choros.cluster.hardware import version

_BACKENDS = {"jax": ("jax", "jaxlib"), "torch": ("torch",), "tensorflow": ("tensorflow",)}


def report() -> str:
    """Return the list of features as lines of text, with ``[X]`` before each available one.

    Example:
        >>> print(report().splitlines()[2])
        Backends of Keras:
    """
    rows = [f"Choros {version('choros')}, Keras {version('keras') or 'not installed'}", "", "Backends of Keras:"]
    for name, modules in _BACKENDS.items():
        is_available = all(is_installed(module) for module in modules)
        rows.append(_row(is_available, _named(name, is_available)))
    problem = _no_shared_memory()
    rows += ["", "Means of exchange between ranks:"]
    rows.append(_row(not problem, "shared memory, on one machine" + (f" ({problem})" if problem else "")))
    is_available = is_installed("mpi4py")
    rows.append(_row(is_available, f"{_named('mpi4py', is_available)}, between hosts"))
    return "\n".join(rows)


def _row(there: bool, text: str) -> str:
    return f"    [{'X' if there else ' '}] {text}"


def _named(name: str, there: bool) -> str:
    return f"{name} {version(name)}".rstrip() if there else name


def _no_shared_memory() -> str:
    """Return the reason why shared memory is not available, or "" if it is."""
    from choros.comm.shm.group import SharedGroup

    try:
        with SharedGroup.create(1, 4096) as segment, SharedGroup(segment, 0):
            return ""
    except OSError as error:
        return str(error)
