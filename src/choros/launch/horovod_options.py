"""Options of Horovod's launcher that Choros does not have: each is ignored or refused, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from choros.errors import InvalidInputError


@dataclass(frozen=True)
class Option:
    """Some options of ``horovodrun`` that get the same answer.

    Attributes:
        names: tuple of str. The options as they are typed.
        values: int. The number of values of each.
        why: str. The reason why it is ignored, or what to do instead.
        refused: bool. Whether it is an error to give the option. Defaults to False.
    """

    names: tuple[str, ...]
    values: int
    why: str
    refused: bool = False

    def answer(self, name: str) -> str:
        """Return the line to print for the option that was given.

        Raises:
            InvalidInputError: the option is refused.

        Example:
            >>> OPTIONS[0].answer("--disable-cache")
            '--disable-cache is ignored: there is no check whose result could be stored'
        """
        if self.refused:
            raise InvalidInputError(f"{name} is an option of horovodrun that Choros does not have: {self.why}")
        return f"{name} is ignored: {self.why}"


_ONE_MACHINE = "the ranks of one machine communicate by shared memory"
_ONE_VECTOR = "the gradients of a step are reduced as one vector"
_FIXED = "choros.run returns what each of a fixed number of ranks returned; the command choros run has elastic jobs"

OPTIONS = (
    Option(("--disable-cache",), 0, "there is no check whose result could be stored"),
    Option(("--tcp", "--gloo", "--mpi"), 0, _ONE_MACHINE),
    Option(("--gloo-timeout-seconds",), 1, f"{_ONE_MACHINE}; see --start-timeout"),
    Option(("--mpi-threads-disable", "--no-mpi-threads-disable"), 0, _ONE_MACHINE),
    Option(("--num-nccl-streams",), 1, _ONE_MACHINE),
    Option(("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"), 1, _ONE_VECTOR),
    Option(
        tuple(f"--{no}{level}" for level in ("hierarchical-allreduce", "hierarchical-allgather") for no in ("", "no-")),
        0,
        _ONE_MACHINE,
    ),
    Option(("--torus-allreduce", "--no-torus-allreduce"), 0, _ONE_MACHINE),
    Option(("--autotune", "--no-autotune"), 0, "there is nothing to tune"),
    Option(
        tuple(
            f"--autotune-{name}"
            for name in (
                "log-file",
                "warmup-samples",
                "steps-per-sample",
                "bayes-opt-max-samples",
                "gaussian-process-noise",
            )
        ),
        1,
        "there is nothing to tune",
    ),
    Option(("--thread-affinity",), 1, "each rank is bound to cores of its own; see --threads and --no-bind"),
    Option(("--binding-args",), 1, "each rank is bound to cores of its own; see --threads and --no-bind"),
    Option(("--log-level",), 1, "Choros writes no log; see --verbose"),
    Option(
        ("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        0,
        "Choros writes no log; see --prefix-output-with-timestamp",
    ),
    Option(("--config-file",), 1, "give the options themselves (Choros depends on no reader of YAML)", True),
    Option(("--mpi-args",), 1, "leave it out; ranks are bound and marked without mpirun", True),
    Option(("--jsrun",), 0, "leave it out to start ranks on this machine", True),
)

# Options that the command choros run has, and the function choros.run, whose ranks are on one host, has not.
_NOT_IN_PYTHON = (
    Option(
        (
            "--min-np",
            "--min-num-proc",
            "--max-np",
            "--max-num-proc",
            "--slots-per-host",
            "--elastic-timeout",
            "--reset-limit",
            "--host-discovery-script",
        ),
        1,
        _FIXED,
        True,
    ),
    Option(("--blacklist-cooldown-range",), 2, _FIXED, True),
    Option(("-p", "--ssh-port", "-i", "--ssh-identity-file"), 1, "nothing is started through ssh"),
    Option(("--network-interfaces", "--network-interface"), 1, _ONE_MACHINE),
)
_KEYWORDS = {
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "slots": "--slots-per-host",
    "cooldown_range": "--blacklist-cooldown-range",
}


def answers(keywords: Mapping[str, Any], keywords_of_run: Collection[str] = ()) -> list[str]:
    """Return the lines to print for keywords of ``horovod.run`` that ``choros.run`` does not have.

    Args:
        keywords: the keywords and their values; None and False count as not given.
        keywords_of_run: the keywords of ``choros.run``, as suggestions for an unknown keyword. Defaults to none.

    Returns:
        One line for each keyword that is ignored.

    Raises:
        TypeError: a keyword is not one of ``horovod.run``.
        InvalidInputError: a keyword is refused.

    Example:
        >>> answers({"ssh_port": 22, "use_mpi": None})
        ['ssh_port is ignored: nothing is started through ssh']
    """
    known = {name: option for option in (*OPTIONS, *_NOT_IN_PYTHON) for name in option.names}
    ignored = []
    for keyword, value in keywords.items():
        option = known.get(_KEYWORDS.get(keyword, f"--{keyword.replace('_', '-')}"))
        if option is None:
            similar = get_close_matches(
                keyword, [*keywords_of_run, *(name.lstrip("-").replace("-", "_") for name in known)], 1
            )
            raise TypeError(
                f"choros.run() has no keyword {keyword!r}{f': did you mean {similar[0]!r}?' if similar else ''}"
            )
        if value is not None and value is not False:
            ignored.append(option.answer(keyword))
    return ignored
