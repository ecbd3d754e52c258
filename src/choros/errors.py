"""Every error that Choros raises, and the tree they form.

::

    ChorosError
    ├── InvalidInputError (ValueError)      an argument cannot work; raised before a worker starts
    │   ├── UnknownAlgorithmError           no algorithm has that name; the message gives a near one
    │   ├── UnstableAlgorithmError          hyper-parameters outside the algorithm's stability bound
    │   ├── InexactLossError                a loss or model that AllReduce could not train exactly
    │   ├── CallsDifferError                the ranks of a group made different calls
    │   ├── NotSerializableError            a model or an object that cannot travel to a worker
    │   ├── NoBackendError (ImportError)    the backend that Keras would load is not installed
    │   └── InvalidDataError                arrays, files or datasets that do not fit together
    ├── WorkerFailedError (RuntimeError)    a worker raised, was killed or ran out of memory
    ├── CheckpointError (OSError)           a checkpoint could not be written or read; earlier files are untouched
    ├── RankMismatchError (RuntimeError)    ranks do not do, or have, the same: other calls, other weights
    ├── PeerLostError (ConnectionError)     seen by a worker: another rank has ended or has given up
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
from typing import Any

AGAIN = 75  # EX_TEMPFAIL: the exit code of who was asked to end, and has left a checkpoint to go on from


class ChorosError(Exception):
    """The root: ``except ChorosError`` catches whatever Choros raises on purpose.

    All of these can be pickled with their attributes, as between processes of a pool, or tasks of Spark.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Have pickle restore what the error holds: Python's own way calls the class with the message alone."""
        return _restore, (type(self), self.args, vars(self))


class InvalidInputError(ChorosError, ValueError):
    """An argument that cannot work. The message says what to give instead; no worker was started."""


class UnknownAlgorithmError(InvalidInputError):
    """No algorithm has that name."""


class UnstableAlgorithmError(InvalidInputError):
    """Hyper-parameters outside the algorithm's stability bound, which the message states."""


class InexactLossError(InvalidInputError):
    """The loss or the model cannot be trained exactly by AllReduce; the message names it."""


class NotSerializableError(InvalidInputError):
    """A model, loss, metric or dataset that cannot travel to a worker."""


class NoBackendError(InvalidInputError, ImportError):
    """The backend that Keras would load is not installed; raised where Keras is imported."""


class InvalidDataError(InvalidInputError):
    """Arrays, files or datasets that are missing, malformed or do not fit together."""


class CallsDifferError(InvalidInputError):
    """The ranks of a group made different calls. Every rank raises it, nothing was done, and the next call works.

    Attributes:
        posted: list. The call of each rank as four whole numbers, in the order of the ranks.
    """

    def __init__(self, message: str, posted: list[tuple[int, int, int, int]]) -> None:
        super().__init__(message)
        self.posted = posted


class CheckpointError(ChorosError, OSError):
    """A checkpoint could not be written, or is not whole. What was written before is untouched."""


class RankMismatchError(ChorosError, RuntimeError):
    """Ranks did not make the same collective call, or have other weights than the others; says which, and what.

    Of a call it is raised on every rank, nothing was done, and the next call works.
    """


class PeerLostError(ChorosError, ConnectionError):
    """Another rank has gone, or the run was given up, while this one waited for it."""


class CommTimeoutError(ChorosError, TimeoutError):
    """A wait reached its limit. ``missing`` holds the ranks that had not come."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class WorkerFailedError(ChorosError, RuntimeError):
    """A worker, or a rank of ``choros.run``, raised, was killed or ran out of memory; the given model is unchanged.

    Attributes:
        rank: int. Which one failed first.
        host: str. The machine it ran on.
        traceback: str. Its Python traceback, or ``""`` where Python did not live to write one.
        signal: str. The signal's name (``"SIGKILL"``) where one ended it, else ``""``.
        peak_memory: int. Its peak resident memory in bytes, 0 where unknown.
        output: str. The last lines that it printed.
        weights: list of numpy arrays in the order of ``model.trainable_variables``: the last
            centre, or ``None`` where training had not begun.
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


def _restore(kind: type[ChorosError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> ChorosError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(attributes)
    return error


def brief(error: BaseException) -> str:
    r"""Return an exception in one line, without terminal colours and what Keras adds to its first cause.

    Example:
        >>> brief(ValueError("\x1b[1mno\x1b[0m\n\nArguments received by Dense.call(): ..."))
        'ValueError: no'
    """
    first = str(error).rsplit("Exception encountered: ", 1)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {first}")
    return textwrap.shorten(re.split("Example:|Arguments received by", text)[0], 320, placeholder=" ...")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of a line of the user's own: the nearest caller that belongs to neither Choros nor Keras.

    Example:
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     warn("slow", RuntimeWarning)
        >>> str(told[0].message), told[0].category.__name__
        ('slow', 'RuntimeWarning')
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("choros", "keras"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
