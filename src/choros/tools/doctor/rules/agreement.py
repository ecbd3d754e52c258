"""Rules about values that must be equal on all ranks: versions, backend, working directory, CPU features."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from choros.backend_choice import BACKENDS, WITHOUT_TRAINING
from choros.launch.process.failure_report import signalled
from choros.tools.doctor.facts import Facts
from choros.tools.doctor.findings import ERROR, WARNING, Finding, Observations, Rule, alike, made

_SHOWN = 8


def versions(seen: Observations) -> Iterator[Finding]:
    """Find libraries with different versions."""
    for name in dict.fromkeys(name for facts in seen.ranks for name in facts["versions"]):
        (usual, _), *others = alike(seen.ranks, partial(_version, name))
        for value, some in others:
            yield made(
                ERROR,
                "versions",
                some,
                f"{{at}}: {name} {value or 'is not installed'}, where the others have {usual or 'none'}.",
                "Give all ranks one environment: the same virtual environment or container, found first on PATH and "
                "PYTHONPATH on every host.",
            )


def backends(seen: Observations) -> Iterator[Finding]:
    """Find different backends, and backends that are not installed or cannot train."""
    if not seen.ranks:
        return
    (usual, _), *others = alike(seen.ranks, _backend)
    for value, some in others:
        yield made(
            ERROR,
            "backend",
            some,
            f"{{at}}: Keras' backend is {value}, where the others have {usual}.",
            f"Export the same KERAS_BACKEND to all ranks, such as KERAS_BACKEND={usual} (mpiexec -x or -genv, srun "
            "--export=ALL), or have one keras.json.",
        )
    for value, some in alike(seen.ranks, _backend):
        lacking = [facts for facts in some if not facts["backend_installed"]]
        if value not in BACKENDS:
            yield made(
                ERROR,
                "no-backend",
                some,
                f"{{at}}: Keras would take {some[0]['backend']}, which "
                f"{'cannot train a model' if value in WITHOUT_TRAINING else 'is not a backend of Keras'}.",
                "Set KERAS_BACKEND to jax, torch or tensorflow, one that is installed.",
            )
        elif lacking:
            yield made(
                ERROR,
                "no-backend",
                lacking,
                f"{{at}}: Keras would take {lacking[0]['backend']}, which is not installed.",
                f"pip install 'choros[{value}]', or set KERAS_BACKEND to one that is.",
            )


def directories(seen: Observations) -> Iterator[Finding]:
    """Find different working directories, and different directories with the same name."""
    if not seen.ranks:
        return
    (usual, same), *others = alike(seen.ranks, lambda each: each["directory"]["path"])
    for value, some in others:
        yield made(
            WARNING,
            "directory",
            some,
            f"{{at}}: the working directory is {value}, where the others have {usual}.",
            "Start all ranks in one directory (mpiexec -wdir, srun --chdir), or name files by their whole path.",
        )
    _, *apart = alike(same, lambda each: each["directory"]["inode"])
    for _, some in apart:
        yield made(
            WARNING,
            "directory",
            some,
            f"{{at}}: the working directory {usual} is another one than that of the other ranks, under the same name.",
            "Work in a directory that all hosts share, or copy data and scripts to each host and write by rank 0.",
        )


def processors(seen: Observations) -> Iterator[Finding]:
    """Find processors that lack features of the submitting machine or of the other hosts."""
    cause, remedy = signalled("SIGILL")
    lacking = [facts for facts in seen.ranks if facts["features"] and _lacks(facts)]
    for missing, some in alike(lacking, _lacks):
        yield made(
            ERROR,
            "processor",
            some,
            f"{{at}}: the processor has no {_few(missing)}, which the submitting machine's has; what was built there "
            f"ends by SIGILL here ({cause}).",
            remedy,
        )
    if lacking or not seen.ranks:
        return
    (usual, _), *others = alike(seen.ranks, lambda each: tuple(each["features"]))
    for value, some in others:
        if missing := sorted(set(usual) - set(value)):
            yield made(
                WARNING,
                "processor",
                some,
                f"{{at}}: the processor has no {_few(missing)}, which the other hosts' have; programs that were "
                "compiled there and kept end by SIGILL here.",
                "Choose hosts of one kind (srun --constraint), or give each kind its own cache of compiled programs.",
            )


def _version(name: str, facts: Facts) -> str:
    return str(facts["versions"].get(name, ""))


def _backend(facts: Facts) -> str:
    return str(facts["backend"]).partition(" ")[0]


def _lacks(facts: Facts) -> tuple[str, ...]:
    """Return the CPU features that the submitting machine has and this machine lacks."""
    return tuple(sorted(set(facts["submitted"]) - set(facts["features"])))


def _few(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


RULES: tuple[Rule, ...] = (versions, backends, directories, processors)
