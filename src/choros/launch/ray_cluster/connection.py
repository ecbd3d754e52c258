"""The connection with a Ray cluster, and the number of ranks that it has room for."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping

from choros.cluster.hardware.network_address import host_and_port
from choros.errors import InvalidInputError, MissingPackageError, brief

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_CONNECT_SECONDS = 10.0  # seconds that a cluster's address may take to answer
_CLIENT_REFUSED = (
    "Ray Client (ray://) is not supported, as the workers connect to the process that calls fit: run it on a node of "
    "the cluster, for example by `ray job submit`."
)


def require_ray() -> None:
    """Refuse to continue without Ray.

    Raises:
        MissingPackageError: Ray is missing; the message has the command that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingPackageError("ray is not installed: pip install 'choros[ray,jax]' (or torch, tensorflow).")


def refuse_client(address: str) -> None:
    """Refuse an address of Ray Client.

    Raises:
        InvalidInputError: the address begins with ``ray://``.
    """
    if address.startswith("ray://"):
        raise InvalidInputError(_CLIENT_REFUSED)


def connect(address: str = "") -> None:
    """Connect this process to a cluster, unless it is connected.

    Args:
        address: the address of the cluster. Defaults to "", the cluster of ``RAY_ADDRESS``, else of this machine.

    Raises:
        MissingPackageError: Ray is not installed.
        InvalidInputError: there is no such cluster, or the connection is one of Ray Client.
    """
    require_ray()
    import ray
    from ray.util.client import ray as client

    if client.is_connected():
        raise InvalidInputError(_CLIENT_REFUSED)
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    refuse_client(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"Ray at {address!r} cannot be reached ({brief(error)}): start this process on a node of a cluster, start "
            "one (ray start --head), or give choros.Ray(address='head:6379')."
        ) from error
    # Ray has set a handler that ends this process. One that was there, such as that of a Checkpoint, is kept.
    main = threading.current_thread() is threading.main_thread()
    if main and handler not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at an address of the form host:port: Ray would try for several minutes."""
    host, port = host_and_port(address)
    if port is not None:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()


def node_resources() -> list[dict[str, float]]:
    """Return the resources of each node of the connected cluster, used or not."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_workers(nodes: Iterable[Mapping[str, float]], cores: int, gpus: int, strategy: str) -> int:
    """Return the number of ranks that nodes have room for.

    Args:
        nodes: the resources of each node.
        cores: of each rank.
        gpus: of each rank.
        strategy: one of ``STRATEGIES``.

    Example:
        >>> nodes = [{"CPU": 5.0, "GPU": 1.0}, {"CPU": 4.0}]
        >>> [most_workers(nodes, 2, 0, strategy) for strategy in STRATEGIES], most_workers(nodes, 2, 1, "PACK")
        ([4, 4, 2, 2], 1)
    """
    counts = [int(node.get("CPU", 0) // cores) for node in nodes]
    if gpus:
        counts = [min(count, int(node.get("GPU", 0) // gpus)) for count, node in zip(counts, nodes, strict=True)]
    if strategy == "STRICT_PACK":
        return max(counts, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def resources_text(resources: Mapping[str, float]) -> str:
    """Return the CPUs and GPUs of some resources.

    Example:
        >>> resources_text({"CPU": 3.0, "memory": 1e9})
        '3 CPU, 0 GPU'
    """
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def cause(error: Exception) -> str:
    r"""Return an error of Ray as one line: its last one, as its traceback and the ids of its objects are before it.

    Example:
        >>> cause(RuntimeError("The actor died\n  actor_id: 1\nModuleNotFoundError: No module named 'keras'"))
        "RuntimeError: ModuleNotFoundError: No module named 'keras'"
    """
    inner = getattr(error, "cause", None)
    if isinstance(inner, Exception):
        return brief(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[-1][:300]}"
