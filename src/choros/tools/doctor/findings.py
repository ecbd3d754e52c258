"""The input and the output of the rules: observations of a job, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from choros.cluster.hostlist import number_ranges
from choros.tools.doctor.facts import Facts

ERROR, WARNING = "error", "warning"
NEED = 1_000_000_000  # approximate bytes of a rank with a backend and a small model


@dataclass(frozen=True)
class Finding:
    """One problem of a job.

    Attributes:
        kind: str. ``"error"`` if the job would fail, train wrongly or be many times slower, else ``"warning"``.
        name: str. A name of the problem, for programs.
        what: str. A description with ranks and hosts.
        remedy: str. Advice.
        ranks: tuple of int. The affected ranks.
        hosts: tuple of str. The affected hosts.
    """

    kind: str
    name: str
    what: str
    remedy: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields in JSON types.

        Example:
            >>> Finding("error", "clock", "Late.", "Set it.", (1,)).as_dict()["ranks"]
            [1]
        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Observations:
    """All observations of a job.

    Attributes:
        size: int. Number of ranks.
        ranks: sequence of facts in the order of the ranks; only of ranks that reported them.
        measures: mapping, a result of ``measurements.measure``; empty if there were no measurements.
        smoke: mapping from a rank to the results of its trainings; empty without trainings.
        troubles: sequence of failures of the diagnosis: ``rank``, ``host``, ``kind`` (``"place"``, ``"probe"``,
            ``"meeting"``, ``"lost"``, ``"died"``), ``text``; and for a process that ended, ``signal`` and ``exit``.
    """

    size: int
    ranks: Sequence[Facts]
    measures: Mapping[str, Any] = field(default_factory=dict)
    smoke: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    troubles: Sequence[Mapping[str, Any]] = ()

    def machines(self) -> list[list[Facts]]:
        """Return the ranks of each machine."""
        return list(_grouped(self.ranks, lambda facts: facts["machine"]).values())


Rule = Callable[[Observations], Iterable[Finding]]


def spell(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    Example:
        >>> spell([1]), spell([0, 1, 2, 5])
        ('rank 1', 'ranks 0-2, 5')
    """
    text = number_ranges(ranks).replace(",", ", ")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def at(some: Iterable[Facts]) -> str:
    """Return ranks and their hosts as text.

    Example:
        >>> at([{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}])
        'ranks 0, 1 on a, b'
    """
    some = list(some)
    hosts = list(dict.fromkeys(facts["host"] for facts in some))
    text = spell(facts["rank"] for facts in some) if len(hosts) == 1 else _listed(some)
    return f"{text} on {', '.join(hosts[:8])}" + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def _listed(some: list[Facts]) -> str:
    ranks = [str(facts["rank"]) for facts in some]
    return f"ranks {', '.join(ranks)}" if len(ranks) <= 16 else spell(facts["rank"] for facts in some)


def made(kind: str, name: str, some: Iterable[Facts], description: str, remedy: str) -> Finding:
    """Return a finding about some ranks.

    Args:
        kind: as in ``Finding``.
        name: as in ``Finding``.
        some: the facts of the ranks.
        description: the description, in which ``{at}`` is replaced by the ranks and hosts.
        remedy: advice.

    Example:
        >>> made(ERROR, "clock", [{"rank": 1, "host": "b"}], "{at}: late.", "Set it.").what
        'Rank 1 on b: late.'
    """
    some = list(some)
    text = description.replace("{at}", at(some))
    hosts = dict.fromkeys(facts["host"] for facts in some)
    return Finding(kind, name, text[0].upper() + text[1:], remedy, tuple(facts["rank"] for facts in some), tuple(hosts))


def together(findings: Iterable[Finding], ranks: Iterable[Facts]) -> list[Finding]:
    """Merge findings that differ only in their ranks and hosts.

    Args:
        findings: findings that ``made`` returned.
        ranks: the facts of all ranks.

    Example:
        >>> both = [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]
        >>> [one.what for one in together([made(ERROR, "clock", [each], "{at}: late.", "") for each in both], both)]
        ['Ranks 0, 1 on a, b: late.']
    """
    facts = {rank_facts["rank"]: rank_facts for rank_facts in ranks}
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        where = (
            at(facts[rank] for rank in finding.ranks) if finding.ranks and facts.keys() >= set(finding.ranks) else ""
        )
        begin = where[:1].upper() + where[1:]
        text = f"{{at}}{finding.what[len(where) :]}" if where and finding.what.startswith(begin) else finding.what
        groups.setdefault((finding.kind, finding.name, text, finding.remedy), []).append(finding)
    return [
        same[0]
        if len(same) == 1
        else made(kind, name, [facts[n] for n in sorted({n for finding in same for n in finding.ranks})], text, remedy)
        for (kind, name, text, remedy), same in groups.items()
    ]


def alike(ranks: Iterable[Facts], key: Callable[[Facts], Any]) -> Iterator[tuple[Any, list[Facts]]]:
    """Yield each value of a key and the ranks that have it, the most frequent value first.

    Example:
        >>> [(value, len(some)) for value, some in alike([{"a": 1}, {"a": 2}, {"a": 2}], lambda each: each["a"])]
        [(2, 2), (1, 1)]
    """
    yield from sorted(_grouped(ranks, key).items(), key=lambda one: -len(one[1]))


def _grouped(ranks: Iterable[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    by_value: dict[Any, list[Facts]] = {}
    for facts in ranks:
        by_value.setdefault(key(facts), []).append(facts)
    return by_value


def available_memory(some: Sequence[Facts]) -> int:
    """Return the bytes of memory that are available to each rank of a machine.

    Args:
        some: the facts of all ranks of one machine.

    Returns:
        The minimum of three: a rank's share of the machine's available memory, its share of the memory left in the
        control group, and an eighth of the limit of its address space.
    """
    limits = []
    for facts in some:
        memory = facts["memory"]
        both = (memory["available"], memory["limit"] and memory["limit"] - memory["used"])
        limits += [remaining // len(some) for remaining in both if remaining is not None]
        if memory["address_space"] is not None:
            limits.append(memory["address_space"] // 8)  # the libraries reserve far more than they use
    return min(limits, default=1 << 33)
