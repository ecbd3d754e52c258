"""Exchange of bytes among ranks that torchrun started, through torchrun's store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta

from choros.errors import CommTimeoutError, InvalidInputError


def join_store(rank: int, size: int, timeout: float) -> tuple[bytes, Callable[[bytes], list[bytes]]]:
    """Return the job's secret, and a function that sends this rank's bytes and returns all ranks' bytes.

    The store itself checks no secret: torchrun's port is meant for a trusted network.

    Args:
        rank: int. This rank.
        size: int. Number of ranks.
        timeout: float. Seconds for all ranks to write to the store.

    Raises:
        InvalidInputError: torchrun's variables or PyTorch are missing.
        CommTimeoutError: the store does not answer, or not all ranks write to it in time.
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
            f"torchrun's MASTER_ADDR={host!r} and MASTER_PORT={port!r} are not the address of a store: start with "
            "torchrun."
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run_id, restart_count = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    time_limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(
            host, int(port), size, is_master=not rank and not agent, timeout=time_limit, wait_for_workers=False
        )
        # The agent's store outlives a restart of the ranks, so the keys of the last attempt are still in it.
        key = f"choros/{run_id}/{restart_count}"
        if not rank:  # a store takes bytes too, which its annotation omits
            store.set(f"{key}/secret", secrets.token_bytes(32))  # pyright: ignore[reportArgumentType]
        secret = bytes(store.get(f"{key}/secret"))
    except (DistStoreError, RuntimeError) as error:
        raise CommTimeoutError(f"rank {rank}: torchrun's store at {host}:{port} does not answer: {error}") from None

    def exchange(data: bytes) -> list[bytes]:
        store.set(f"{key}/{rank}", data)  # pyright: ignore[reportArgumentType] - a store takes bytes
        try:
            return [bytes(store.get(f"{key}/{other}")) for other in range(size)]
        except (DistStoreError, RuntimeError) as error:
            raise CommTimeoutError(f"rank {rank}: not all of {size} ranks wrote to torchrun's store: {error}") from None

    return secret, exchange
