"""Who is slow, and whose clock is wrong: only what was seen each time, and far outside of what chance does."""

from __future__ import annotations

from collections.abc import Iterator

from choros.doctor.findings import ERROR, WARNING, Finding, Rule, Seen, made
from choros.doctor.measures import SLOW_CPU, SLOW_WALL, slowest
from choros.doctor.rules.cores import crowded

_ATTEMPTS = 3
_SKEW = 0.1  # seconds


def slow(seen: Seen) -> Iterator[Finding]:
    """A rank for which all others wait."""
    attempts = seen.measures.get("work", [])
    busy = {rank for finding in crowded(seen) for rank in finding.ranks}
    if len(attempts) < _ATTEMPTS:
        return
    for kind, limit in (("cpu", SLOW_CPU), ("wall", SLOW_WALL)):
        found = [slowest(attempt[kind]) for attempt in attempts]
        ranks, least = {rank for rank, _ in found}, min(times for _, times in found)
        if len(ranks) == 1 and least >= limit and not ranks & busy:
            some = [each for each in seen.ranks if each["rank"] in ranks]
            if kind == "cpu":
                why = "Its processor itself is slower"
                remedy = (
                    "Look at its clock, temperature and power limit there (turbostat, nvidia-smi -q), choose hosts of one "
                    "kind, or an algorithm in which nobody waits (AEASGD, ADAG)."
                )
            else:
                why = "Something else runs on its cores, or it is stopped now and then"
                remedy = (
                    "Look there with top for what else runs; ask for whole hosts (--exclusive), bind ranks to cores of "
                    "their own, and end what earlier jobs left."
                )
            yield made(
                ERROR,
                "slow-rank",
                some,
                f"{{at}} takes {least:.1f} times as long as the others for the same computation. {why}.",
                remedy,
            )
            return


def clock(seen: Seen) -> Iterator[Finding]:
    """Clocks that differ by more than anything that measures them."""
    bounds = seen.measures.get("clock", [])
    for each in seen.ranks:
        least, most = bounds[each["rank"]] if each["rank"] < len(bounds) else (0.0, 0.0)
        if least > _SKEW or most < -_SKEW:
            by = f"{least:.2f} s ahead of" if least > _SKEW else f"{-most:.2f} s behind"
            yield made(
                WARNING,
                "clock",
                [each],
                f"{{at}}: the clock is at least {by} rank 0's.",
                "Have it set by NTP or chrony on every host (timedatectl); until then times in logs, traces and on files "
                "do not compare.",
            )


RULES: tuple[Rule, ...] = (slow, clock)
