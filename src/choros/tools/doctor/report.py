"""The report, as a dict and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from choros.launch.process.failure_report import amount
from choros.tools.doctor.facts import Facts
from choros.tools.doctor.findings import ERROR, Finding, Observations, alike, spell
from choros.tools.doctor.rules import judge
from choros.tools.doctor.rules.speed import slowest

_WIDTH = 12


def summary(seen: Observations) -> dict[str, Any]:
    """Return all observations and findings in JSON types.

    Args:
        seen: the observations of the job.

    Returns:
        ``size``, ``healthy`` (no findings), ``findings``, ``ranks``, ``measures``, ``smoke``, ``troubles``.

    Example:
        >>> summary(Observations(1, []))["healthy"]
        True
    """
    findings = judge(seen)
    return {
        "size": seen.size,
        "healthy": not findings,
        "findings": [finding.as_dict() for finding in findings],
        "ranks": list(seen.ranks),
        "measures": dict(seen.measures),
        "smoke": {str(rank): [dict(end) for end in ends] for rank, ends in seen.smoke.items()},
        "troubles": [dict(trouble) for trouble in seen.troubles],
    }


def code_of(report: dict[str, Any]) -> int:
    """Return the exit code: 1 if there is an error, else 0.

    Example:
        >>> code_of({"findings": [{"kind": "warning"}]})
        0
    """
    return int(any(finding["kind"] == ERROR for finding in report["findings"]))


def text(report: dict[str, Any]) -> str:
    """Return the report as text.

    Args:
        report: a result of ``summary``.

    Returns:
        Lines with facts, measurements and findings.

    Example:
        >>> text(summary(Observations(1, []))).splitlines()[-1]
        'nothing to change'
    """
    lines = [*_facts(report["ranks"]), *_measures(report), *_trainings(report), ""]
    for finding in report["findings"]:
        lines += [f"{finding['kind'].upper()} {finding['name']}: {finding['what']}", f"    {finding['remedy']}"]
    if not report["findings"]:
        lines.append("nothing to change")
    return "\n".join(lines).lstrip("\n")


def _facts(ranks: Sequence[Facts]) -> Iterator[str]:
    if not ranks:
        return
    yield from _row("ranks", ranks, _ranks)
    yield from _row("hosts", ranks, lambda each: each["host"])
    rows: dict[str, Callable[[Facts], str]] = {
        "cores": _cores,
        "threads": lambda each: _pairs(each["threads"]) or "no variable is set",
        "set by choros": lambda each: _pairs(each.get("chosen", {})),
        "memory": _memory,
        "/dev/shm": lambda each: amount(each["shm"]["total"]) if each["shm"] else "none",
        "open files": lambda each: str(each["files"]["soft"]),
        "versions": lambda each: ", ".join(
            f"{name} {version}" for name, version in each["versions"].items() if version
        ),
        "backend": lambda each: each["backend"],
        "processor": lambda each: " ".join(each["features"]),
        "GPUs": lambda each: " ".join(filter(None, [str(each["gpus"] or ""), _pairs(each["devices"])])),
        "directory": lambda each: each["directory"]["path"],
        "interfaces": _interfaces,
        "network": lambda each: _pairs(each["network"]),
    }
    for name, row_text in rows.items():
        yield from _row(name, ranks, row_text)


def _row(name: str, ranks: Sequence[Facts], text_of: Callable[[Facts], str]) -> Iterator[str]:
    """Yield one line if all ranks have the same value, else one line for each value."""
    values = list(alike(ranks, text_of))
    for value, some in values:
        suffix = f"  ({spell(facts['rank'] for facts in some)})" if len(values) > 1 else ""
        if value or len(values) > 1:
            yield f"{name:<{_WIDTH}} {value or '-'}{suffix}"


def _ranks(facts: Facts) -> str:
    launcher = "(started without a launcher)" if facts["launcher"] == "single" else f"by {facts['launcher']}"
    exchange = "no exchange needed" if facts["size"] == 1 else f"exchange by: {facts['group']}"
    return f"{facts['size']} {launcher}; {exchange}"


def _cores(facts: Facts) -> str:
    cores = facts["cores"]
    usable = ",".join(map(str, cores["usable"][:16])) + (",..." if len(cores["usable"]) > 16 else "")
    quota = f", time of {cores['quota']:g} allowed" if cores["quota"] else ""
    return f"{len(cores['usable'])} of {cores['machine']} ({usable}){quota}"


def _memory(facts: Facts) -> str:
    memory = facts["memory"]
    limits = [f"{amount(memory[name])} {label}" for name, label in _LIMITS.items() if memory[name] is not None]
    return f"{amount(memory['total'] or 0)}" + (f", limited to {', '.join(limits)}" if limits else "")


_LIMITS = {"limit": "by the control group", "address_space": "of addresses"}


def _interfaces(facts: Facts) -> str:
    return ", ".join(
        f"{interface['name']} {interface['addresses'][0]}"
        + (f" {interface['speed'] / 1e3:g} Gbit/s" if interface["speed"] else "")
        for interface in facts["interfaces"]
        if interface["up"] and interface["addresses"]
    )


def _measures(report: dict[str, Any]) -> Iterator[str]:
    measures = report["measures"]
    if not measures:
        return
    yield f"{'bandwidth':<{_WIDTH}} memory {_span(measures['memory'], 'GB/s')} for each rank, all at once"
    wall = measures["work"][-1]["wall"]
    if len(wall) > 1:
        rank, spread = slowest(wall)
        yield f"{'stragglers':<{_WIDTH}} the slowest, rank {rank}, takes {spread:.2f} times as long as the median"
        least = min(low for low, _ in measures["clock"])
        most = max(high for _, high in measures["clock"])
        yield f"{'clocks':<{_WIDTH}} within {max(most, -least) * 1e3:.2g} ms of rank 0's"
    rates = [rate * 8e-9 for rate in measures.get("links", {}).values()]
    if rates:
        yield f"{'network':<{_WIDTH}} {_span(rates, 'Gbit/s')} between neighbouring hosts"
    for name, engine in measures["engines"].items():
        sums = ", ".join(
            f"{amount(int(size))} in {_seconds(took)} ({int(size) / took / 1e9:.2g} GB/s)"
            for size, took in engine["sum"].items()
        )
        yield f"{'engine':<{_WIDTH}} {name}: gather {_seconds(engine['gather'])}; sum {sums}"


def _trainings(report: dict[str, Any]) -> Iterator[str]:
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for ends in report["smoke"].values():
        for end in ends:
            by_backend.setdefault(end["backend"], []).append(end)
    for name, ends in by_backend.items():
        good = all(end["difference"] is not None for end in ends)
        most = max(end["difference"] or 0.0 for end in ends)
        peak = max(end["peak"] for end in ends)
        agrees = f"a small training agrees with a numpy reference (difference {most:.1g})"
        how = f"{agrees}, {amount(peak)} for each rank" if good else "failed"
        yield f"{'training':<{_WIDTH}} {name}: {how}"


def _span(values: Sequence[float], unit: str) -> str:
    return f"{min(values):.3g} to {max(values):.3g} {unit}" if len(values) > 1 else f"{values[0]:.3g} {unit}"


def _seconds(value: float) -> str:
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def brief(findings: Sequence[Finding]) -> str:
    """Return findings as lines, for a rank that could not connect to the others.

    Example:
        >>> brief([Finding("error", "clock", "Late.", "Set it.")])
        'ERROR clock: Late. Set it.'
    """
    return "\n".join(f"{finding.kind.upper()} {finding.name}: {finding.what} {finding.remedy}" for finding in findings)
