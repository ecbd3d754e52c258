"""A check that all ranks of a job have the same settings, before any of them trains."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from choros.comm.group import Group
from choros.consistency.model_fingerprint import digest_of, first_difference, layers_of, named, settings, short
from choros.consistency.versions import versions
from choros.data import serialization
from choros.errors import InvalidInputError
from choros.types import Batch

# Of a job, what only rank 0 knows.
_RANK_0 = ("seed", "per_batch", "progress", "watched", "validate_average", "repeats")
_APART = (*_RANK_0, "source", "validation", "host", "built")
_OF_A_MODEL = ("model", "variables")
_WORDS = {"fold_seed": "seed", "metric_values": "metrics", "averaged_metrics": "metrics", "mode": "algorithm or mode"}
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
_ADVICE = "All ranks run the same script, with the same data and libraries."


class JobSettings(Protocol):
    """The settings of a rank, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """Return the settings as plain JSON."""
        ...


JobT = TypeVar("JobT", bound=JobSettings)


def agree(group: Group, job: JobT, facts: dict[str, Any], model: Any) -> JobT:
    """Take rank 0's seed, and refuse ranks that were told to do different things.

    Args:
        group: all ranks.
        job: what this rank was told.
        facts: by name, of data and model what JSON can hold and must be the same on every rank.
        model: keras.Model, of which the facts tell.

    Returns:
        The job, with what only rank 0 knows.

    Raises:
        InvalidInputError: on every rank, if one differs from rank 0; names what differs.
    """

    def gather(told: Any) -> list[Any]:
        found = []
        for rank, text in enumerate(group.gather(json.dumps(told).encode())):
            try:
                found.append(json.loads(text))
            except ValueError:
                raise InvalidInputError(
                    f"Rank {rank} does something else than a Trainer's fit here: all ranks run the same script, with "
                    "the same CHOROS_COMM."
                ) from None
        return found

    said = gather({**facts, **job.json(), **facts, "host": platform.node()})
    if problem := difference(said, model, gather):
        raise InvalidInputError(f"{problem} {_ADVICE}")
    return replace(job, **{name: said[0][name] for name in _RANK_0})


def difference(
    said: Sequence[dict[str, Any]],
    model: Any,
    gather: Callable[[Any], list[Any]],
    ranks: Sequence[int] = (),
    apart: Sequence[str] = (),
) -> str:
    """Say which rank was told something else than the first one, where it is, and what; "" where none was.

    Args:
        said: what each rank was told; the same list on every rank.
        model: this rank's, of which the layers are told where models differ.
        gather: gives what every rank gives it; called by all ranks or by none.
        ranks: what they are called. Defaults to their numbers in ``said``.
        apart: names of facts that may differ.
    """
    first = said[0]
    for place, other in enumerate(said):
        skipped = {*_APART, *apart, *(_OF_A_MODEL if other.get("built") != first.get("built") else ())}
        different = [name for name in other if name not in skipped and other[name] != first.get(name)]
        if not different:
            continue
        name = different[0]
        told = f"{short(other[name])} and {short(first.get(name))}"
        if name == "model":  # the same for all: the ranks have equal libraries, which come before it
            layers = gather(layers_of(model))
            told = first_difference(layers[place], layers[0]) or told
            different = [each for each in different if each != "variables"]
        names = ", ".join(dict.fromkeys(_WORDS.get(each, each) for each in different))
        numbers = ranks or range(len(said))
        return (
            f"Rank {numbers[place]} on {other['host']} and rank {numbers[0]} on {first['host']} were told different "
            f"things: {names} ({told})."
        )
    return ""


def facts_of(model: Any, source: Any, validation: Any, batch_size: int) -> dict[str, Any]:
    """Return, of libraries, script, model and data, what must be the same on every rank, as plain JSON.

    Args:
        model: keras.Model, built and compiled.
        source: of batches to train on.
        validation: of those to validate with, or None.
        batch_size: int. Global.
    """
    facts = {
        **facts_of_model(model),
        "rows": source.rows,
        "steps": source.steps(batch_size),
        "validation_data": None if validation is None else validation.rows,
    }
    if not source.indexed:
        facts["first_batch"] = digest(source.sample())
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def facts_of_model(model: Any) -> dict[str, Any]:
    """Return, of libraries, script and model, what must be the same on every rank, as plain JSON.

    The learning rate is not among it, nor names and seeds that each process draws.

    Args:
        model: keras.Model, compiled.
    """
    metrics = getattr(model, "_compile_metrics", None)
    facts = {
        "libraries": _libraries(),
        "script": _script(),
        "model": _layers(model),
        "variables": [list(variable.shape) for variable in model.weights],
        "optimizer": optimizer_of(model.optimizer),
        "loss": named(model.loss),
        "metrics": named(getattr(metrics, "_user_metrics", None) or []),
        "weighted_metrics": named(getattr(metrics, "_user_weighted_metrics", None) or []),
    }
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def digest(batch: Batch) -> str:
    """Return what tells two batches apart."""
    digest = hashlib.blake2b(digest_size=8)
    for array in serialization.flat(batch)[1]:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _layers(model: Any) -> str:
    """The digest of a model's layers; kept, as it takes a tenth of a second of 200, until it is compiled anew."""
    state = id(model.optimizer), [(layer.trainable, layer.built) for layer in model._flatten_layers()]
    if _digests.get(model, (None, ""))[0] != state:
        _digests[model] = state, digest_of(layers_of(model))
    return _digests[model][1]


@functools.cache
def _libraries() -> dict[str, str]:
    found = versions()
    with suppress(metadata.PackageNotFoundError):
        found["choros"] = metadata.version("choros")
    return found


def _script() -> str:
    """Return the digest of the script that runs, "" if there is no file of it."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if path else ""
    except OSError:
        return ""


def optimizer_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's class and settings, the learning rate left out."""
    own = {name: value for name, value in settings(optimizer).items() if name != "learning_rate"}
    inner = getattr(optimizer, "inner_optimizer", None)
    return [type(optimizer).__name__, own, *([] if inner is None else [optimizer_of(inner)])]
