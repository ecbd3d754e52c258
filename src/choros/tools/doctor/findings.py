"""The input and the result of the rules: everything that was seen, and a list of findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from choros.tools.doctor.facts import Facts

ERROR, WARNING = "error", "warning"
NEED = 1_000_000_000  # bytes: about what a rank takes with a backend and a small model


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: str. ``"error"``: the job would fail, train wrongly or be many times slower; ``"warning"``: else.
        name: str. The fault, for programs.
        what: str. What is wrong, with its ranks and hosts.
        remedy: str. What to do.
        ranks: tuple of int. Where.
        hosts: tuple of str. Where.
    """

    kind: str
    name: str
    what: str
    remedy: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    def said(self) -> dict[str, Any]:
        """As JSON holds it.

        Example:
            >>> Finding("error", "clock", "Late.", "Set it.", (1,)).said()["ranks"]
            [1]
        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Observations:
    """Everything that is known of a job.

    Attributes:
        size: int. How many ranks it has.
        ranks: sequence of facts, in the order of the ranks; of those only that told theirs.
        measures: mapping, as ``measures.measure`` gave it; empty where it did not come to that.
        smoke: mapping from a rank to how its trainings ended; empty where they were left out.
        troubles: sequence. What went wrong meanwhile: ``rank``, ``host``, ``kind`` (``"place"``, ``"probe"``,
            ``"meeting"``, ``"lost"``, ``"died"``), ``text``, and for a process that ended ``signal`` and ``exit``.
    """

    size: int
    ranks: Sequence[Facts]
    measures: Mapping[str, Any] = field(default_factory=dict)
    smoke: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    troubles: Sequence[Mapping[str, Any]] = ()

    def machines(self) -> list[list[Facts]]:
        """The ranks of each machine."""
        found: dict[str, list[Facts]] = {}
        for each in self.ranks:
            found.setdefault(each["machine"], []).append(each)
        return list(found.values())


Rule = Callable[[Observations], Iterable[Finding]]


def spell(ranks: Iterable[int]) -> str:
    """Ranks in words.

    Example:
        >>> spell([1]), spell([0, 1, 2, 5])
        ('rank 1', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def at(some: Iterable[Facts]) -> str:
    """Ranks and their hosts in words.

    Example:
        >>> at([{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}])
        'ranks 0, 1 on a, b'
    """
    some = list(some)
    hosts = list(dict.fromkeys(each["host"] for each in some))
    text = spell(each["rank"] for each in some) if len(hosts) == 1 else _listed(some)
    return f"{text} on {', '.join(hosts[:8])}" + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def _listed(some: list[Facts]) -> str:
    ranks = [str(each["rank"]) for each in some]
    return f"ranks {', '.join(ranks)}" if len(ranks) <= 16 else spell(each["rank"] for each in some)


def made(kind: str, name: str, some: Iterable[Facts], what: str, remedy: str) -> Finding:
    """A finding about some ranks.

    Args:
        kind: as in ``Finding``.
        name: as in ``Finding``.
        some: the facts of the ranks.
        what: what is wrong; ``{at}`` stands for the ranks and hosts.
        remedy: what to do.

    Example:
        >>> made(ERROR, "clock", [{"rank": 1, "host": "b"}], "{at}: late.", "Set it.").what
        'Rank 1 on b: late.'
    """
    some = list(some)
    text = what.replace("{at}", at(some))
    hosts = dict.fromkeys(each["host"] for each in some)
    return Finding(kind, name, text[0].upper() + text[1:], remedy, tuple(each["rank"] for each in some), tuple(hosts))


def together(findings: Iterable[Finding], ranks: Iterable[Facts]) -> list[Finding]:
    """Findings that differ by nothing but their ranks and hosts, as one.

    Args:
        findings: each as ``made`` made it.
        ranks: the facts of all ranks.

    Example:
        >>> both = [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]
        >>> [one.what for one in together([made(ERROR, "clock", [each], "{at}: late.", "") for each in both], both)]
        ['Ranks 0, 1 on a, b: late.']
    """
    facts = {each["rank"]: each for each in ranks}
    found: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        where = at(facts[rank] for rank in one.ranks) if one.ranks and facts.keys() >= set(one.ranks) else ""
        begin = where[:1].upper() + where[1:]
        words = f"{{at}}{one.what[len(where) :]}" if where and one.what.startswith(begin) else one.what
        found.setdefault((one.kind, one.name, words, one.remedy), []).append(one)
    return [
        same[0]
        if len(same) == 1
        else made(kind, name, [facts[n] for n in sorted({n for one in same for n in one.ranks})], words, remedy)
        for (kind, name, words, remedy), same in found.items()
    ]


def alike(ranks: Iterable[Facts], key: Callable[[Facts], Any]) -> Iterator[tuple[Any, list[Facts]]]:
    """Ranks by what they have in common, the most first.

    Example:
        >>> [(value, len(some)) for value, some in alike([{"a": 1}, {"a": 2}, {"a": 2}], lambda each: each["a"])]
        [(2, 2), (1, 1)]
    """
    found: dict[Any, list[Facts]] = {}
    for each in ranks:
        found.setdefault(key(each), []).append(each)
    yield from sorted(found.items(), key=lambda one: -len(one[1]))


def room(some: Sequence[Facts]) -> int:
    """Bytes of memory that each of a machine's ranks may take.

    Args:
        some: the facts of all ranks of one machine.

    Returns:
        The least of its part of what the machine and their control group have left, and of its own address space.
    """
    found = []
    for each in some:
        memory = each["memory"]
        both = (memory["available"], memory["limit"] and memory["limit"] - memory["used"])
        found += [left // len(some) for left in both if left is not None]
        if memory["address_space"] is not None:
            found.append(memory["address_space"] // 8)  # the libraries reserve far more than they take
    return min(found, default=1 << 33)
