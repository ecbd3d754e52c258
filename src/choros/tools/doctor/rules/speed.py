"""Rules about slow ranks and wrong clocks. Only large and repeated deviations are reported."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from choros.tools.doctor.findings import ERROR, WARNING, Finding, Observations, Rule, made
from choros.tools.doctor.rules.cores import crowded

SLOW_WALL, SLOW_CPU = 1.8, 1.6  # factors to the median from which a rank is measured again
ATTEMPTS, MISSES = 5, 1  # most measurements, and number of those in which a reported rank may be fast
_MUCH = 2.5  # factor to the median from which a slow rank is an error
_SKEW = 0.1  # seconds of clock difference that are permitted


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """Return the slowest rank, and its time divided by the median. With two ranks, the median is the faster one.

    Example:
        >>> slowest([1.0, 5.0]), slowest([2.0])
        ((1, 5.0), (0, 1.0))
    """
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    return rank, seconds[rank] / max(statistics.median_low(seconds), 1e-9)


def slow(seen: Observations) -> Iterator[Finding]:
    """Find a rank that is slower than the others, so that these wait."""
    attempts = seen.measures.get("work", [])
    busy = {rank for finding in crowded(seen) for rank in finding.ranks}
    if len(attempts) < ATTEMPTS:
        return
    for kind, limit in (("cpu", SLOW_CPU), ("wall", SLOW_WALL)):
        slowest_ranks = [slowest(attempt[kind]) for attempt in attempts]
        rank = statistics.mode(number for number, _ in slowest_ranks)
        slower = [times for number, times in slowest_ranks if number == rank and times >= limit]
        if len(slower) >= ATTEMPTS - MISSES and rank not in busy:
            some, times = [facts for facts in seen.ranks if facts["rank"] == rank], statistics.median(slower)
            if kind == "cpu":
                why = "Its processor itself is slower"
                remedy = (
                    "Look at its clock, temperature and power limit there (turbostat, nvidia-smi -q), choose hosts of "
                    "one kind, or an asynchronous algorithm (AEASGD, ADAG)."
                )
            else:
                why = "Something else runs on its cores, or it is stopped now and then"
                remedy = (
                    "Look there with top for what else runs; ask for whole hosts (--exclusive), bind ranks to cores of "
                    "their own, and end what earlier jobs left."
                )
            yield made(
                ERROR if times >= _MUCH else WARNING,
                "slow-rank",
                some,
                f"{{at}} takes {times:.1f} times as long as the others for the same computation. {why}.",
                remedy,
            )
            return


def clock(seen: Observations) -> Iterator[Finding]:
    """Find clocks whose difference from rank 0's clock exceeds 0.1 s with certainty."""
    bounds = seen.measures.get("clock", [])
    for facts in seen.ranks:
        least, most = bounds[facts["rank"]] if facts["rank"] < len(bounds) else (0.0, 0.0)
        if least > _SKEW or most < -_SKEW:
            by = f"{least:.2f} s ahead of" if least > _SKEW else f"{-most:.2f} s behind"
            yield made(
                WARNING,
                "clock",
                [facts],
                f"{{at}}: the clock is at least {by} rank 0's.",
                "Have it set by NTP or chrony on every host (timedatectl); until then times in logs, traces and on "
                "files do not compare.",
            )


RULES: tuple[Rule, ...] = (slow, clock)
