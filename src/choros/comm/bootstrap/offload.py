"""Offload of a group's large sums to a library that ``CHOROS_COMM`` names.

Choros never chooses a library by itself, not even NCCL. Gradients pass through host memory, so NCCL would copy them to
the GPU and back, which the sum in host memory does not need.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TypeVar

from choros.cluster.hardware.network_address import LOOPBACK, own_address
from choros.comm.bootstrap.exit_hooks import let_root_cause_exit_first
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.host_identity import machine
from choros.comm.offload.group import ControlGroup, OffloadGroup, as_control_group
from choros.comm.shared_values import gather_values, share_value
from choros.comm.shm.group_header import FAILURE_GRACE
from choros.comm.tcp.auth_socket import free_port, listening_socket
from choros.errors import ChorosError, InvalidInputError, PeerLostError

_T = TypeVar("_T")
_BACKEND_PACKAGE = "choros.comm.offload."
_PEER_REPORT_SECONDS = 0.5  # seconds for the other ranks to report that rank 0 failed, before JAX ends them
_exit_limits: list[float] = []


def with_offload(group: Group, library: str, timeout: float) -> Group:
    """Return the group, or a group that delegates large sums to a library. All ranks call.

    Args:
        group: Group. All ranks.
        library: str. "torch" (NCCL if every rank has its own CUDA device, else gloo), "jax", or "" for none.
        timeout: float. Seconds that the ranks wait for each other.

    Raises:
        InvalidInputError: on every rank, if one rank cannot use the library; the message has the reason.
    """
    if group.size == 1 or not library:
        return group
    control = as_control_group(group)
    group_with_backend = _jax_group(control, timeout) if library == "jax" else _torch_group(control, timeout)
    _on_all_ranks(control, group_with_backend.try_out)
    return group_with_backend


def _torch_group(control: ControlGroup, timeout: float) -> OffloadGroup:
    def load() -> tuple[ModuleType, str]:
        module = import_module(_BACKEND_PACKAGE + "torch")
        return module, module.device()

    module, device = _on_all_ranks(control, load)
    devices = list(map(tuple, gather_values(control, [machine(), device])))
    nccl = all(name for _, name in devices) and len(set(devices)) == control.size
    address = _address(control)
    port, listen_fd = listening_socket(address) if control.rank == 0 else (0, None)
    rank_zero_address, rank_zero_port = share_value(control, [address, port])
    store = _on_all_ranks(
        control, lambda: module.open_store(rank_zero_address, rank_zero_port, control.size, listen_fd, timeout)
    )
    backend = _on_all_ranks(control, lambda: module.TorchBackend(store, control.rank, control.size, address, nccl))
    return OffloadGroup(control, backend)


def _jax_group(control: ControlGroup, timeout: float) -> OffloadGroup:
    def load() -> ModuleType:
        module = import_module(_BACKEND_PACKAGE + "jax")
        module.check_unused()
        return module

    module = _on_all_ranks(control, load)
    address = _address(control)
    coordinator = control.gather(f"{address}:{free_port(address)}".encode())[0].decode()
    rank_zero_leaves_last = _on_all_ranks(
        control, lambda: module.start(coordinator, control.rank, control.size, timeout, watched=True)
    )
    let_root_cause_exit_first(f"rank {control.rank} of {control.size} on {os.uname().nodename}")
    if rank_zero_leaves_last:
        _note_failure()
        # Registered after JAX's own exit handlers, which its import registers. So it runs before them: the order is
        # reversed.
        atexit.register(_leave_in_order, control, module.leave)
    return OffloadGroup(control, _on_all_ranks(control, lambda: module.JaxBackend(range(control.size))))


def _address(control: ControlGroup) -> str:
    """Return the address of this host for the other ranks."""
    one_host = len(hosts_of(control)) == 1
    return LOOPBACK if one_host else own_address(os.environ.get("CHOROS_NETWORK", ""))


def _on_all_ranks(control: ControlGroup, action: Callable[[], _T]) -> _T:
    """Call ``action`` on every rank; raise on all ranks if it fails on one."""
    problem, results = "", list[_T]()
    try:
        results.append(action())
    except (ChorosError, ImportError, OSError, RuntimeError, ValueError) as error:
        problem = str(error) or type(error).__name__
    # All ranks gather, also one that failed: a rank that raised alone would leave the others inside the library's
    # start.
    for rank, text in enumerate(control.gather(problem.encode())):
        if text:
            raise InvalidInputError(f"Rank {rank} of {control.size} cannot use this library for sums: {text.decode()}")
    return results[0]


def _leave_in_order(control: ControlGroup, leave: Callable[[], None]) -> None:
    """Leave at exit of Python. Rank 0 leaves last: it runs JAX's service, and JAX ends the other ranks with it."""
    if control.rank:
        leave()
        control.leave_after_peers(0.0)
    else:
        control.leave_after_peers(*_exit_limits[:1] or [math.inf])


def _note_failure() -> None:
    """Install a hook that limits rank 0's wait at exit after an exception: the other ranks fail soon as well."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        _exit_limits.append(FAILURE_GRACE if issubclass(kind, PeerLostError) else _PEER_REPORT_SECONDS)
        previous(kind, error, tb)

    sys.excepthook = report
