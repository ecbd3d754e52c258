"""``choros doctor -n 4``: start the ranks, and build the report from their partial results if ranks fail."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any

from choros.launch.call_io import create
from choros.launch.local_job import LaunchOptions, check_outside, start
from choros.launch.process.rank_limit import check_ranks
from choros.launch.process.rank_supervisor import JobResult
from choros.tools.doctor.findings import Observations
from choros.tools.doctor.rank_check import HAND
from choros.tools.doctor.report import summary


def visit_all(size: int, options: Sequence[str]) -> dict[str, Any]:
    """Start ranks of ``choros doctor`` on this machine, as ``choros run`` does.

    Args:
        size: number of ranks.
        options: options of ``choros doctor`` for each rank.

    Returns:
        The report of rank 0, else a report from the partial results of the ranks.

    Raises:
        InvalidInputError: this process is a rank.
    """
    check_outside("run choros doctor without -n there")
    check_ranks(size, "give a smaller -n")
    memories: list[int] = []
    try:
        memories += [create("choros-doctor") for _ in range(size)]
        outcome = start(
            [sys.executable, "-P", "-m", "choros", "doctor", *options],
            LaunchOptions(size),
            own=[{HAND: str(fd)} for fd in memories],
            own_fds=[[fd] for fd in memories],
            announce=False,
        )
        if outcome.signal:
            signal.raise_signal(outcome.signal)  # the ranks have ended: now the signal takes effect on this process
            raise KeyboardInterrupt
        return _put_together(size, outcome, [_read(fd) for fd in memories])
    finally:
        for fd in memories:
            os.close(fd)


def _put_together(size: int, outcome: JobResult, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of rank 0 if there is one and no rank died; else a report from the ranks' partial results."""
    report = parts[0].get("report")
    died = [
        {
            "rank": rank,
            "host": platform.node(),
            "kind": "died",
            "text": f"Rank {rank} of {size} on {platform.node()}",
            "signal": ended.signal,
            "exit": ended.exit,
            "tail": output,
        }
        for rank, ended, output in outcome.failed
        if ended.signal or not (report or parts[rank].get("troubles"))
    ]
    if report is not None and not died:
        return dict(report)
    ranks = next((part["ranks"] for part in parts if len(part.get("ranks", ())) == size), None)
    rank_facts = [entry for part in parts for entry in part.get("ranks", ())[:1]] if ranks is None else ranks
    troubles = [trouble for part in parts for trouble in part.get("troubles", ())]
    return summary(Observations(size, rank_facts, troubles=[*died, *troubles]))


def _read(fd: int) -> dict[str, Any]:
    """Return the results that a rank wrote; an empty dict if it wrote none or died while it wrote them."""
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    try:
        facts: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return facts
