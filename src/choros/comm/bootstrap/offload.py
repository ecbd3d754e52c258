"""The library that makes a group's large sums, where ``CHOROS_COMM`` names one.

None is chosen by itself, NCCL neither: gradients pass through the host, so NCCL would take them to the GPU and back
once more than the sum in memory that it replaces.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from choros.cluster.hardware.network_address import LOOPBACK, own_address
from choros.comm.bootstrap.exit_hooks import let_the_cause_end_first
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.host_identity import machine
from choros.comm.offload.group import ControlGroup, OffloadGroup, wide_of
from choros.comm.shm.group_header import GRACE
from choros.comm.tcp.auth_socket import free_port, listener
from choros.errors import ChorosError, InvalidInputError, PeerLostError

_T = TypeVar("_T")
_CARRIERS = "choros.comm.offload."
_CAUSE = 0.5  # seconds in which the other ranks can say that they lost rank 0
_failing: list[float] = []


def summed(group: Group, asked: str, timeout: float) -> Group:
    """Return the group as it is, or one whose large sums a library makes; all ranks call.

    Args:
        group: all ranks.
        asked: str. "torch" (NCCL where every rank has a CUDA device of its own, else gloo), "jax", or "": none.
        timeout: float. Seconds that the ranks wait for each other.

    Raises:
        InvalidInputError: on every rank, if the library cannot be had on one; says why.
    """
    if group.size == 1 or not asked:
        return group
    wide = wide_of(group)
    made = _by_jax(wide, timeout) if asked == "jax" else _by_torch(wide, timeout)
    _on_all(wide, made.try_out)
    return made


def _by_torch(wide: ControlGroup, timeout: float) -> OffloadGroup:
    def load() -> tuple[Any, str]:
        module = import_module(_CARRIERS + "torch")
        return module, module.device()

    module, device = _on_all(wide, load)
    devices = [tuple(json.loads(text)) for text in wide.gather(json.dumps([machine(), device]).encode())]
    nccl = all(found for _, found in devices) and len(set(devices)) == wide.size
    address = _address(wide)
    port, hears = listener(address) if wide.rank == 0 else (0, None)
    host, at = json.loads(wide.gather(json.dumps([address, port]).encode())[0])
    store = _on_all(wide, lambda: module.open_store(host, at, wide.size, hears, timeout))
    carrier = _on_all(wide, lambda: module.TorchCarrier(store, wide.rank, wide.size, address, nccl))
    return OffloadGroup(wide, carrier)


def _by_jax(wide: ControlGroup, timeout: float) -> OffloadGroup:
    def load() -> Any:
        module = import_module(_CARRIERS + "jax")
        module.check_unused()
        return module

    module = _on_all(wide, load)
    address = _address(wide)
    first = wide.gather(f"{address}:{free_port(address)}".encode())[0].decode()
    alone = _on_all(wide, lambda: module.start(first, wide.rank, wide.size, timeout, watched=True))
    let_the_cause_end_first(f"rank {wide.rank} of {wide.size} on {os.uname().nodename}")
    if alone:
        _note_failure()
        atexit.register(_leave, wide, module.leave)
    return OffloadGroup(wide, _on_all(wide, lambda: module.JaxCarrier(range(wide.size))))


def _address(wide: ControlGroup) -> str:
    """Return the address at which other ranks reach this host."""
    near = len(hosts_of(wide)) == 1
    return LOOPBACK if near else own_address(os.environ.get("CHOROS_NETWORK", ""))


def _on_all(wide: ControlGroup, make: Callable[[], _T]) -> _T:
    """Do something on every rank, and have all fail where one does."""
    problem, made = "", None
    try:
        made = make()
    except (ChorosError, ImportError, OSError, RuntimeError, ValueError) as error:
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(wide.gather(problem.encode())):
        if text:
            raise InvalidInputError(f"Rank {rank} of {wide.size} cannot have its sums made so: {text.decode()}")
    found: Any = made
    result: _T = found
    return result


def _leave(wide: ControlGroup, leave: Callable[[], None]) -> None:
    """As Python ends: rank 0, whose process tells JAX's of each other, ends last."""
    if wide.rank:
        leave()
        wide.outlive(0.0)
    else:
        wide.outlive(*_failing[:1] or [math.inf])


def _note_failure() -> None:
    """Remember whether this process ends by an exception: the others need not be waited for long then."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failing.append(GRACE if issubclass(kind, PeerLostError) else _CAUSE)
        before(kind, error, trace)

    sys.excepthook = tell
