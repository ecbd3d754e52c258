"""Rules about processes that failed: ranks, their helper processes, and trainings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from choros.launch.process.failure_report import signalled
from choros.tools.doctor.findings import ERROR, WARNING, Finding, Observations, Rule, made, spell
from choros.tools.doctor.smoke_processes import EXACT

_SECOND = ("PeerLostError", "CommTimeoutError", "Broken pipe")  # errors that follow from another rank's failure
_MEET = "Start the job with choros run, or with the mpiexec or srun of the MPI that mpi4py uses, on enough memory."
_MISSING = "Look at its last output, and check that its host can be reached. --timeout gives it more time."


def _ended(end: Mapping[str, Any]) -> tuple[str, str]:
    """Return a description of the end of a process, and advice."""
    name = str(end.get("signal", ""))
    if name:
        cause, remedy = signalled(name)
        return f"was ended by {name}" + (f" ({cause})" if cause else ""), remedy
    last = str(end.get("tail", "")).splitlines()[-1:]
    return f"exited with code {end.get('exit')}" + (f": {last[0].removesuffix('.')}" if last else ""), ""


def _name(end: Mapping[str, Any], otherwise: str) -> str:
    return str(end.get("signal") or otherwise).lower()


def troubles(seen: Observations) -> Iterator[Finding]:
    """Find ranks without a place, ranks that cannot import a library or cannot connect, and ranks that died."""
    died = [trouble for trouble in seen.troubles if trouble["kind"] in ("died", "probe")]
    by_text: dict[str, list[Mapping[str, Any]]] = {}
    for trouble in seen.troubles:
        if trouble["kind"] in ("died", "probe"):
            how, remedy = _ended(trouble)
            text = f"{trouble['text']} {how}."
            known = remedy or "The last lines that it printed say why; install the library again, or load its module."
            yield Finding(ERROR, _name(trouble, trouble["kind"]), text, known, (trouble["rank"],), (trouble["host"],))
        elif not (trouble["kind"] == "lost" and died):
            by_text.setdefault(
                trouble["kind"] if trouble["kind"] == "lost" else trouble["kind"] + trouble["text"], []
            ).append(trouble)
    for some in by_text.values():
        first = some[0]
        ranks = tuple(sorted({trouble["rank"] for trouble in some}))
        hosts = tuple(dict.fromkeys(trouble["host"] for trouble in some))
        missing = tuple(first.get("missing", ()))
        if first["kind"] == "lost":
            yield Finding(ERROR, "missing", first["text"], _MISSING, missing or ranks, hosts)
            continue
        text, _, remedy = str(first["text"]).partition(". ")
        name = "singleton" if "the ranks would train separate models" in text else first["kind"]
        ranks_text = f"{spell(ranks)} on {', '.join(hosts)}"
        text = text if text.lower().startswith(ranks_text.lower()) else f"{ranks_text}: {text}"
        yield Finding(ERROR, name, f"{text[0].upper()}{text[1:].rstrip('.')}.", remedy or _MEET, ranks, hosts)


def trainings(seen: Observations) -> Iterator[Finding]:
    """Find trainings that died, failed, took too long or gave wrong weights."""
    bad: dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]] = {}
    for rank, ends in seen.smoke.items():
        for end in ends:
            if fault := _fault(end):
                bad.setdefault((end["backend"], fault), []).append((rank, end))
    first = {backend for backend, fault in bad if fault in ("died", "failed", "differs")}
    for (backend, fault), some in bad.items():
        if fault in ("second", "late") and backend in first:
            continue
        ranks = [rank for rank, _ in some]
        end = some[0][1]
        facts = [facts_of_rank for facts_of_rank in seen.ranks if facts_of_rank["rank"] in ranks]
        how, remedy = _ended(end)
        if fault == "differs":
            how = f"gave weights that differ by {end['difference']:.3g} from numpy's"
            remedy = "Do not train with it there: install the backend again, and look at the host's memory and devices."
        elif fault == "late":
            how, remedy = "did not end in time", "See whether its files lie on a slow disk, or give --smoke-timeout."
        yield made(
            ERROR,
            _name(end, "training") if fault == "died" else "training",
            facts,
            f"the training on {backend} by {{at}} {how}.",
            remedy
            or f"Try it alone: KERAS_BACKEND={backend} python -m choros.tools.doctor.smoke_train; install the backend "
            "again.",
        )


def _fault(end: Mapping[str, Any]) -> str:
    if end["signal"]:
        return "died"
    if end["late"]:
        return "late"
    if end["difference"] is None:
        return "second" if any(phrase in end["tail"] for phrase in _SECOND) else "failed"
    return "" if end["difference"] <= EXACT else "differs"


def sums(seen: Observations) -> Iterator[Finding]:
    """Find wrong sums of the group."""
    wrong = [facts for facts in seen.ranks if facts["rank"] in seen.measures.get("wrong", ())]
    if wrong:
        yield made(
            ERROR,
            "sums",
            wrong,
            "{at} got wrong sums from the others.",
            "Memory, network or the MPI library is broken there: choose other hosts, and tell their administrators.",
        )


def alone(seen: Observations) -> Iterator[Finding]:
    """Find a single process in an allocation for several."""
    for facts in seen.ranks:
        under = facts["scheduler"]
        many = next((under[name] for name in ("SLURM_NTASKS", "LSB_DJOB_NUMPROC") if name in under), "1")
        if facts["launcher"] == "single" and many.isdecimal() and int(many) > 1:
            yield made(
                WARNING,
                "alone",
                [facts],
                f"{{at}} is one process in an allocation for {many}: what a job's own shell runs is not a rank.",
                "Start the ranks: srun choros doctor, or mpiexec choros doctor.",
            )


RULES: tuple[Rule, ...] = (troubles, trainings, sums, alone)
