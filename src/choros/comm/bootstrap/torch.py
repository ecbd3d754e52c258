"""Ranks that torchrun started learn of each other through its store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta

from choros.errors import CommTimeoutError, InvalidInputError


def come(rank: int, size: int, timeout: float) -> tuple[bytes, Callable[[bytes], list[bytes]]]:
    """Return the job's secret, and what brings this rank's bytes to the store, once, and returns everybody's.

    The store itself asks nobody for a secret: as torchrun has it, its port is for a trusted network.

    Args:
        rank: int.
        size: int.
        timeout: float. Seconds for all to come.

    Raises:
        InvalidInputError: the variables of torchrun are missing, or PyTorch is.
        CommTimeoutError: not all come.
    """
    try:
        from torch.distributed import DistStoreError, TCPStore
    except ImportError as error:
        raise InvalidInputError(
            f"torchrun started this rank, but its PyTorch cannot be imported here: {error}"
        ) from None
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise InvalidInputError(
            f"torchrun's MASTER_ADDR={host!r} and MASTER_PORT={port!r} tell no place to meet: start it with torchrun."
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, again = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    until = timedelta(seconds=timeout)
    try:
        store = TCPStore(host, int(port), size, is_master=not rank and not agent, timeout=until, wait_for_workers=False)
        key = f"choros/{run}/{again}"
        if not rank:
            store.set(f"{key}/secret", secrets.token_bytes(32))
        secret = bytes(store.get(f"{key}/secret"))
    except (DistStoreError, RuntimeError) as error:
        raise CommTimeoutError(f"rank {rank}: torchrun's store at {host}:{port} does not answer: {error}") from None

    def swap(mine: bytes) -> list[bytes]:
        store.set(f"{key}/{rank}", mine)
        try:
            return [bytes(store.get(f"{key}/{other}")) for other in range(size)]
        except (DistStoreError, RuntimeError) as error:
            raise CommTimeoutError(f"rank {rank}: not all of {size} ranks came to torchrun's store: {error}") from None

    return secret, swap
