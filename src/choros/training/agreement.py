"""Whether all ranks of a job were told the same, before any of them trains."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from choros.data import packing
from choros.errors import BadInput
from choros.training.job import Job
from choros.transport import Group
from choros.types import Batch

_RANK_0 = ("seed", "per_batch", "batch_weights", "progress")  # of a job, what only rank 0 knows
_APART = (*_RANK_0, "source", "validation")
_WORDS = {"fold_seed": "seed", "metric_values": "metrics", "averaged_metrics": "metrics", "meet": "algorithm or meet"}
_LONG = 200  # letters of what one rank was told, in an error
_UNLIKE = ("name", "learning_rate")  # of an optimizer: drawn, or taken from rank 0


def agree(group: Group, job: Job, facts: dict[str, Any]) -> Job:
    """Take rank 0's seed, and refuse ranks that were told to do different things.

    Args:
        group: all ranks.
        job: what this rank was told.
        facts: by name, of data and model what JSON can hold and must be the same on every rank.

    Returns:
        The job, with what only rank 0 knows.

    Raises:
        BadInput: on every rank, if one differs from rank 0; names what differs.
    """
    here = {"host": platform.node()}
    said = []
    for rank, text in enumerate(group.gather(json.dumps({**facts, **job.json(), **facts, **here}).encode())):
        try:
            said.append(dict(json.loads(text)))
        except ValueError:
            raise BadInput(
                f"Rank {rank} does something else than a Trainer's fit here: all ranks run the same script, with the "
                "same CHOROS_GROUP."
            ) from None
    first = said[0]
    for rank, other in enumerate(said):
        different = [name for name in other if name not in (*_APART, "host") and other[name] != first.get(name)]
        if different:
            name = different[0]
            names = dict.fromkeys(_WORDS.get(each, each) for each in different)
            raise BadInput(
                f"Rank {rank} on {other['host']} and rank 0 on {first['host']} were told different things: "
                f"{', '.join(names)} ({_short(other[name])} and {_short(first.get(name))}). All ranks run the same "
                "script, with the same data and libraries."
            )
    return replace(job, **{name: first[name] for name in _RANK_0})


def _short(told: Any) -> str:
    text = repr(told)
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def facts_of(model: Any, source: Any, validation: Any, batch_size: int) -> dict[str, Any]:
    """Return, of libraries, script, model and data, what must be the same on every rank, as plain JSON.

    Args:
        model: keras.Model, built and compiled.
        source: of batches to train on.
        validation: of those to validate with, or None.
        batch_size: int. Global.
    """
    facts: dict[str, Any] = {
        "libraries": _libraries(),
        "script": _script(),
        "rows": source.rows,
        "steps": source.steps(batch_size),
        "validation_data": None if validation is None else validation.rows,
        "variables": [list(variable.shape) for variable in model.variables],
        "optimizer": optimizer_of(model.optimizer),
        "loss": named(model.loss),
    }
    if not source.indexed:
        facts["first_batch"] = digest(source.sample())
    found: dict[str, Any] = json.loads(json.dumps(facts, default=named))
    return found


def digest(batch: Batch) -> str:
    """Return what tells two batches apart."""
    digest = hashlib.blake2b(digest_size=8)
    for array in packing.flat(batch)[1]:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    import keras

    backend = keras.backend.backend()
    names = {"tensorflow": ("tensorflow", "tensorflow-cpu")}.get(backend, (backend,))
    found = {"python": platform.python_version().rpartition(".")[0], "keras": keras.__version__, "backend": backend}
    for name in ("choros", "numpy", *names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _script() -> str:
    """What tells two scripts apart: the digest of the one that runs, "" where there is no file of it."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if path else ""
    except OSError:
        return ""


def optimizer_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's class and settings, the learning rate left out."""
    config = optimizer.get_config()
    return [type(optimizer).__name__, {name: value for name, value in config.items() if name not in _UNLIKE}]


def named(part: Any) -> Any:
    """A loss, or a part of a configuration, as what tells two kinds of it apart."""
    if part is None or isinstance(part, str | int | float | bool):
        return part
    if isinstance(part, list | tuple):
        return [named(each) for each in part]
    if isinstance(part, dict):
        return {str(name): named(each) for name, each in part.items()}
    if callable(getattr(part, "tolist", None)):
        return part.tolist()
    return getattr(part, "__name__", type(part).__name__)
