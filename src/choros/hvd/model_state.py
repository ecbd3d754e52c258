"""The variables of Keras models that ranks share: those of one model, and those of all."""

from __future__ import annotations

import gc
from typing import Any

import keras

from choros.backends import seed_state
from choros.errors import InvalidInputError
from choros.hvd.collectives import broadcast_variables
from choros.hvd.context import context


def state_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model and of its optimizer, without the seeds of random layers."""
    seed_ids = {id(v) for v in seed_state.find(model)}
    variables = [*model.variables, *(model.optimizer.variables if getattr(model, "optimizer", None) else [])]
    return [v for v in variables if id(v) not in seed_ids]


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast the root's values of all variables of all Keras models and of their optimizers.

    Keras 3 keeps no list of all variables. So this broadcasts the models in memory, in the order of their names. Every
    rank calls it with the same models. Random layers keep the seeds of their rank.

    Args:
        root_rank: int. The rank that sends its values.

    Raises:
        ValueError: before ``init``.
        InvalidInputError: two models have the same name, so they cannot be matched to the root's.
        RankMismatchError: on every rank, if the ranks have different models.

    Example:
        >>> import choros.hvd as hvd
        >>> hvd.init()
        >>> hvd.broadcast_global_variables(0)
    """
    context()
    gc.collect()  # an unreferenced model may be collected on one rank only, and the lists would differ
    models = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), keras.Model)]
    inner = {id(layer) for model in models for layer in model._flatten_layers(include_self=False)}
    named: dict[str, Any] = {}
    for model in models:
        if id(model) not in inner and named.setdefault(model.name, model) is not model:
            raise InvalidInputError(
                f"Two models are called {model.name!r}, so nothing tells which is which on the root: give each a name, "
                "or call hvd.broadcast_variables(model.variables, root_rank) for each."
            )
    variables = {id(v): v for name in sorted(named) for v in state_of(named[name])}
    broadcast_variables(list(variables.values()), root_rank)
