"""Options of ``choros submit`` for each scheduler: an option without an effect is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from choros.errors import InvalidInputError
from choros.launch.schedulers.option_names import named, scheduler_option

BY_MPI = ("slurm", "pbs", "lsf", "sge")  # schedulers whose script depends on the ranks' MPI
_BATCH = ("slurm", "pbs", "flux", "lsf", "sge")
_SCHEDULERS_OF = {
    "image": ("k8s",),
    "kind": ("k8s",),
    "runtime": ("k8s",),
    "master": ("spark",),
    "archive": ("spark",),
    "max_nodes": ("spark",),
    "resource_manager": ("spark",),
    "filesystems": ("pbs",),
    "mpi": BY_MPI,
    "account": _BATCH,
    "setup": (*_BATCH, "spark"),
    "directive": (*_BATCH, "spark"),
    "time": (*_BATCH, "k8s"),
    "signal": (*_BATCH, "k8s"),
    "wrap": (*_BATCH, "k8s"),
    "threads_per_core": (*_BATCH, "k8s"),
}
_REMEDIES = {
    "k8s": "Kubernetes has no place for it in a manifest: put it into the image, or leave it out",
    "spark": "Spark does not know it: leave it out (what spark-submit knows goes after -o)",
}
_NOT_WITH_CONNECT = ("nodes", "ranks_per_node", "cores", "gpus", "queue", "directive", "archive")
_WITH_STOP_TIME = ("pbs", "flux", "lsf", "sge")  # schedulers whose script computes the time of the signal itself


def accepts(on: str, option: str) -> bool:
    """Return whether the script for a scheduler uses an option.

    Example:
        >>> accepts("k8s", "account"), accepts("slurm", "account")
        (False, True)
    """
    return on in _SCHEDULERS_OF.get(option, (on,))


def check_options(on: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the script for this scheduler would not use.

    Args:
        on: the scheduler's name.
        options: options, by the attributes of ``JobOptions``, and their values; None or an empty value means not given.

    Raises:
        InvalidInputError: an option has no effect there; names the schedulers for which it has.

    Example:
        >>> check_options("k8s", {"image": "me/train:1", "mpi": ""})
        >>> check_options("slurm", {"image": "me/train:1"})
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: --image is for --on k8s: slurm has no use for it, leave it out
    """
    # 0 is a value of the signal: none.
    given_options = {k: v for k, v in options.items() if v or (k == "signal" and v is not None)}
    for name in given_options:
        where = _SCHEDULERS_OF.get(name, (on,))
        if on not in where:
            why = _REMEDIES.get(on, f"{on} has no use for it, leave it out")
            raise InvalidInputError(f"{named(name)} is for {scheduler_option(where)}: {why}")
        if name in _NOT_WITH_CONNECT and str(given_options.get("master", "")).startswith("sc://"):
            raise InvalidInputError(
                f"{named(name)} is for the cluster's own server where {named('master')} is {given_options['master']}: "
                "leave it out"
            )
    if "runtime" in given_options and given_options.get("kind") != "trainjob":
        raise InvalidInputError("--runtime is that of a TrainJob: give --kind trainjob too, or leave it out")
    if on in _WITH_STOP_TIME and given_options.get("signal") and "time" not in given_options:
        raise InvalidInputError(
            f"{named('signal')} counts back from the time limit, and the script for {on} has none: give "
            f"{named('time')} too"
        )
