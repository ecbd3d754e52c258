"""The group of a job's ranks: what its launcher brought, one a process, shared by all that meets in it."""

from __future__ import annotations

import os

from choros.errors import BadInput
from choros.transport.shared_group import SharedGroup

_joined: dict[str, SharedGroup] = {}


def join(rank: int, size: int, timeout: float) -> SharedGroup:
    """Return the group of this job's ranks; the same one for everything in a script.

    Raises:
        BadInput: the launcher passed no group (only ``choros run`` does so far), or one of another size.
    """
    descriptor = os.environ.get("CHOROS_GROUP_FD")
    if not descriptor:
        raise BadInput(
            "This process is a rank of a job that brings no shared memory for its ranks: start it with "
            "`choros run -n RANKS script.py`, or unset the launcher's variables to train with workers of its own."
        )
    if "group" not in _joined:
        group = SharedGroup(int(descriptor), rank, timeout=timeout)
        if group.size != size:
            group.close()
            raise BadInput(
                f"Rank {rank} is one of {size}, says the launcher, but the group that it brought has {group.size}: the "
                f"ranks would train apart. Start them with `choros run -n {size} script.py`."
            )
        _joined["group"] = group
    return _joined["group"]
