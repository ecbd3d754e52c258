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
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from choros.comm.group import Group
from choros.consistency.model_fingerprint import digest_of, first_difference, layers_of, named, settings, short
from choros.consistency.versions import versions
from choros.data import Source, serialization
from choros.errors import InvalidInputError
from choros.types import Batch

if TYPE_CHECKING:
    import keras

# Settings that the other ranks take from rank 0.
_RANK_0_SETTINGS = (
    "seed",
    "per_batch",
    "progress",
    "watched",
    "run_metrics",
    "validate_average",
    "repeats",
    "timeline",
)
_NOT_COMPARED = (*_RANK_0_SETTINGS, "source", "validation", "host", "built")
_MODEL_FACTS = ("model", "variables")
# Names of settings in messages, where the attribute has another one.
_NAMES_IN_MESSAGES = {
    "fold_seed": "seed",
    "checkpoint_schedule": "checkpoint",
    "metric_values": "metrics",
    "averaged_metrics": "metrics",
    "mode": "algorithm or mode",
}
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
_ADVICE = "All ranks run the same script, with the same data and libraries."


class JobSettings(Protocol):
    """The settings of a rank, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """Return the settings as plain JSON."""
        ...


JobT = TypeVar("JobT", bound=JobSettings)


def agree(group: Group, job: JobT, facts: dict[str, Any], model: keras.Model) -> JobT:
    """Take rank 0's seed, and refuse ranks with different settings.

    Args:
        group: Group. All ranks.
        job: this rank's settings.
        facts: dict of plain JSON. Facts on data and model that must be equal on every rank.
        model: keras.Model. The model of the facts.

    Returns:
        The job, with the values that only rank 0 has.

    Raises:
        InvalidInputError: on every rank, if a rank differs from rank 0; the message names the difference.
    """

    def gather(value: object) -> list[Any]:
        replies = []
        for rank, text in enumerate(group.gather(json.dumps(value).encode())):
            try:
                replies.append(json.loads(text))
            except ValueError:
                raise InvalidInputError(
                    f"Rank {rank} makes another call than this Trainer's fit: run the same script on all ranks, with "
                    "the same CHOROS_COMM."
                ) from None
        return replies

    # The facts come first, as the message names the first difference, and they replace settings of the same name.
    settings_by_rank = gather({**facts, **job.json(), **facts, "host": platform.node()})
    if problem := difference(settings_by_rank, model, gather):
        raise InvalidInputError(f"{problem} {_ADVICE}")
    return replace(job, **{name: settings_by_rank[0][name] for name in _RANK_0_SETTINGS})


def difference(
    facts_by_rank: Sequence[dict[str, Any]],
    model: keras.Model,
    gather: Callable[[Any], list[Any]],
    ranks: Sequence[int] = (),
    ignored: Sequence[str] = (),
) -> str:
    """Return a message on the first rank whose settings differ from the first rank's, or "".

    Args:
        facts_by_rank: for each rank, its facts; the same list on every rank.
        model: keras.Model. This rank's model; the message names its layers if the models differ.
        gather: returns the argument of every rank; all ranks call it, or none.
        ranks: sequence of int. The ranks' numbers in the message. Defaults to their numbers in the list.
        ignored: sequence of str. Names of facts that may differ.
    """
    first = facts_by_rank[0]
    for index, other in enumerate(facts_by_rank):
        skipped = {*_NOT_COMPARED, *ignored, *(_MODEL_FACTS if other.get("built") != first.get("built") else ())}
        different = [name for name in other if name not in skipped and other[name] != first.get(name)]
        if not different:
            continue
        name = different[0]
        values = f"{short(other[name])} and {short(first.get(name))}"
        if name == "model":  # the same for all: the ranks have equal libraries, which come before it
            layers = gather(layers_of(model))
            values = first_difference(layers[index], layers[0]) or values
            different = [fact for fact in different if fact != "variables"]
        names = ", ".join(dict.fromkeys(_NAMES_IN_MESSAGES.get(fact, fact) for fact in different))
        numbers = ranks or range(len(facts_by_rank))
        return (
            f"Rank {numbers[index]} on {other['host']} and rank {numbers[0]} on {first['host']} have different "
            f"settings: {names} ({values})."
        )
    return ""


def facts_of(model: keras.Model, source: Source, validation: Source | None, batch_size: int) -> dict[str, Any]:
    """Return the facts on libraries, script, model and data that must be equal on every rank, as plain JSON.

    Args:
        model: keras.Model, built and compiled.
        source: Source. The training data.
        validation: Source or None. The validation data.
        batch_size: int. The global batch size.
    """
    facts = {
        **facts_of_model(model),
        "rows": source.rows,
        "steps": source.steps(batch_size),
        "validation_data": None if validation is None else validation.rows,
    }
    if not source.indexed:
        facts["first_batch"] = digest(source.sample(batch_size))
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def facts_of_model(model: keras.Model) -> dict[str, Any]:
    """Return the facts on libraries, script and model that must be equal on every rank, as plain JSON.

    The facts leave out the learning rate, and names and seeds that each process draws.

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
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def digest(batch: Batch) -> str:
    """Return a digest of a batch."""
    digest = hashlib.blake2b(digest_size=8)
    for array in serialization.flat(batch)[1]:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _layers(model: keras.Model) -> str:
    """Return the digest of a model's layers. It is cached until the model is compiled again: 200 layers take 0.1 s."""
    state = id(model.optimizer), [(layer.trainable, layer.built) for layer in model._flatten_layers()]
    if _digests.get(model, (None, ""))[0] != state:
        _digests[model] = state, digest_of(layers_of(model))
    return _digests[model][1]


@functools.cache
def _libraries() -> dict[str, str]:
    installed = versions()
    with suppress(metadata.PackageNotFoundError):
        installed["choros"] = metadata.version("choros")
    return installed


def _script() -> str:
    """Return the digest of the script, or "" if the script is not a file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if path else ""
    except OSError:
        return ""


def optimizer_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return an optimizer's class and settings without the learning rate."""
    plain_settings = {name: value for name, value in settings(optimizer).items() if name != "learning_rate"}
    inner = getattr(optimizer, "inner_optimizer", None)
    return [type(optimizer).__name__, plain_settings, *([] if inner is None else [optimizer_of(inner)])]
