"""All errors of Choros, and their class tree.

::

    ChorosError
    ├── InvalidInputError (ValueError)      an argument is not valid; raised before a worker starts
    │   ├── UnknownAlgorithmError           no algorithm has that name; the message suggests a similar one
    │   ├── UnstableAlgorithmError          hyperparameters outside the algorithm's stability bound
    │   ├── InexactLossError                a loss or model that AllReduce could not train exactly
    │   ├── CallsDifferError                the ranks of a group made different calls
    │   ├── NotSerializableError            a model or an object that cannot be pickled for a worker
    │   ├── MissingPackageError (ImportError)  an optional package is not installed; the message has the command
    │   │   └── NoBackendError              the backend that Keras would load is not installed
    │   └── InvalidDataError                arrays, files or datasets that are missing or do not match
    ├── WorkerFailedError (RuntimeError)    a worker raised, was killed or ran out of memory
    ├── SchedulerError (RuntimeError)       a command of a cluster's scheduler failed, or does not know the job
    ├── CheckpointError (OSError)           a checkpoint could not be written or read; earlier files are unchanged
    ├── RankMismatchError (RuntimeError)    the ranks make different calls, or have different weights
    ├── PeerLostError (ConnectionError)     another rank has ended or has aborted the run
    └── CommTimeoutError (TimeoutError)     a wait reached its limit; the message names the missing ranks

Example:
    >>> from choros.errors import InvalidInputError, UnknownAlgorithmError
    >>> issubclass(UnknownAlgorithmError, InvalidInputError) and issubclass(InvalidInputError, ValueError)
    True
"""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any

AGAIN = 75  # EX_TEMPFAIL: exit code of a process that saved a checkpoint on a signal, and can resume


class ChorosError(Exception):
    """The base class of all errors of Choros.

    The errors can be pickled with their attributes, for example between processes of a pool or tasks of Spark.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickle restore the attributes too: by default it calls the class with the message only."""
        # OSError keeps the names of files beside ``args`` and ``__dict__``.
        files = {name: getattr(self, name, None) for name in ("filename", "filename2")}
        return _restore, (
            type(self),
            self.args,
            vars(self) | {name: file for name, file in files.items() if file is not None},
        )


class InvalidInputError(ChorosError, ValueError):
    """Invalid argument. The message contains the remedy; no worker was started."""


class UnknownAlgorithmError(InvalidInputError):
    """Unknown name of an algorithm."""


class UnstableAlgorithmError(InvalidInputError):
    """Hyperparameters outside the algorithm's stability bound, which the message states."""


class InexactLossError(InvalidInputError):
    """Loss or model that AllReduce cannot train exactly; the message names it."""


class NotSerializableError(InvalidInputError):
    """Model, loss, metric, dataset or other object that cannot be pickled for another process."""


class MissingPackageError(InvalidInputError, ImportError):
    """Missing optional package; the message has the command that installs it."""


class NoBackendError(MissingPackageError):
    """Missing backend of Keras; raised when Keras is imported."""


class InvalidDataError(InvalidInputError):
    """Arrays, files or datasets that are missing, malformed or do not match each other."""


class CallsDifferError(InvalidInputError):
    """Different calls by the ranks of a group. Every rank raises it; no call was made, and the next call works.

    Attributes:
        posted: list. The call of each rank as four ints, in rank order.
    """

    def __init__(self, message: str, posted: list[tuple[int, int, int, int]]) -> None:
        super().__init__(message)
        self.posted = posted


class SchedulerError(ChorosError, RuntimeError):
    """Failure of a command of a cluster's scheduler: it refused a job, or does not know it."""


class CheckpointError(ChorosError, OSError):
    """Failure to write a checkpoint, or an incomplete checkpoint. Earlier files are unchanged."""


class RankMismatchError(ChorosError, RuntimeError):
    """Different collective calls or weights of the ranks; the message names the ranks and the differences.

    For a call, it is raised on every rank; no call was made, and the next call works.
    """


class PeerLostError(ChorosError, ConnectionError):
    """End of another rank, or abort of the run, while this rank waited."""


class CommTimeoutError(ChorosError, TimeoutError):
    """Timeout of a wait for other ranks or processes.

    Attributes:
        missing: tuple of int. The ranks that did not arrive; empty if unknown.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class WorkerFailedError(ChorosError, RuntimeError):
    """Failure of a worker, or of a rank of ``choros.run``: it raised, was killed or ran out of memory.

    The given model is unchanged.

    Attributes:
        rank: int. The rank that failed first.
        host: str. Its host.
        traceback: str. Its Python traceback, or ``""`` if there is none.
        signal: str. The name of the signal that ended it (``"SIGKILL"``), else ``""``.
        peak_memory: int. Its peak resident memory in bytes, 0 if unknown.
        output: str. Its last lines of output.
        weights: list of numpy arrays in the order of ``model.trainable_variables``: the last center variable, or
            ``None`` if training had not begun.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str = "",
        traceback: str = "",
        signal: str = "",
        peak_memory: int = 0,
        output: str = "",
        weights: list[Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.traceback = traceback
        self.signal = signal
        self.peak_memory = peak_memory
        self.output = output
        self.weights = weights


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to an unknown one, or "" if none is similar.

    Example:
        >>> nearest("rnu", ["run", "where"]), nearest("Slrum", ["slurm"]), nearest("xyz", ["run", "where"])
        ('run', 'slurm', '')
        >>> nearest("--jsno", ["--help", "--json"]), nearest("--schedulr", ["--help", "--json"])
        ('--json', '')
    """
    from difflib import get_close_matches  # imported here, as most processes never need it

    # Compare without the dashes, which all options have. Ignore the case only if no word is similar otherwise.
    words = list(known)
    for change in (str, str.lower):
        originals = {change(candidate.lstrip("-")): candidate for candidate in reversed(words)}
        if matches := get_close_matches(change(word.lstrip("-")), originals, 1):
            return originals[matches[0]]
    return ""


def suggestion(word: str, known: Iterable[str], otherwise: str = "known are") -> str:
    """Return the known word that is most similar to an unknown one, as a question; without one, all known words.

    Args:
        word: the unknown word.
        known: the known words.
        otherwise: the words before the list. Defaults to "known are".

    Example:
        >>> suggestion("rnu", ["run", "where"]), suggestion("xyz", ["run", "where"])
        ('did you mean run?', 'known are run, where')
    """
    words = list(known)
    similar = nearest(word, words)
    return f"did you mean {similar}?" if similar else f"{otherwise} {', '.join(words)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "rank"), counted(4, "epoch"), counted(0, "batch"), counted(2, "process")
        ('1 rank', '4 epochs', '0 batches', '2 processes')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('tch', 'ss')) else 's'}"


def named_type(value: object) -> str:
    """Return the name of the type of a value, with its article.

    Example:
        >>> named_type(3), named_type("3")
        ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _restore(kind: type[ChorosError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> ChorosError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def brief(error: BaseException) -> str:
    r"""Return an exception as one line, without terminal colors, the text that Keras adds, and a final full stop.

    Example:
        >>> brief(ValueError("\x1b[1mno.\x1b[0m\n\nArguments received by Dense.call(): ..."))
        'ValueError: no'
    """
    first = str(error).rsplit("Exception encountered: ", 1)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {first}")
    line = textwrap.shorten(re.split("Example:|Arguments received by", text)[0], 320, placeholder=" ...")
    return re.sub(r"(?<=[^\s.])\.$", "", line)


_warned_arguments: set[tuple[str, str]] = set()  # a name of Choros and an argument of it


def warn_without_effect(owner: str, reason: str, /, **given: object) -> None:
    """Warn of arguments that were given and have no effect: of each one once in a process.

    Args:
        owner: str. The function or class.
        reason: str. The reason.
        **given: for each argument, whether a value was given that asks for an effect.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         warn_without_effect("train", "there is one device", device="gpu:1", depth=0)
        >>> [str(warning.message) for warning in caught]
        ['device has no effect on train: there is one device; remove it.']
    """
    names = [argument for argument, value in given.items() if value and (owner, argument) not in _warned_arguments]
    _warned_arguments.update((owner, argument) for argument in names)
    if names:
        verb, object_ = ("has", "it") if len(names) == 1 else ("have", "them")
        warn(f"{', '.join(names)} {verb} no effect on {owner}: {reason}; remove {object_}.")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line: that of the nearest caller outside of Choros and Keras.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught_warnings:
        ...     warnings.simplefilter("always")
        ...     warn("slow", RuntimeWarning)
        >>> str(caught_warnings[0].message), caught_warnings[0].category.__name__
        ('slow', 'RuntimeWarning')
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("choros", "keras"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
