"""Seed states of random layers: find them, and make them differ by rank reproducibly."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.types import Array

if TYPE_CHECKING:
    import keras

NAME = "seed_generator_state"  # the name that keras.random.SeedGenerator gives its variable


def find(model: keras.Model) -> list[Any]:
    """Return the state variables of the model's seed generators, in Keras' order."""
    return [v for v in model.non_trainable_variables if v.name == NAME]


def mix(state: Array, index: int, rank: int, seed: int | None) -> Array:
    """Return a new seed state that depends only on the arguments: blake2b of (seed or state, index, rank).

    Args:
        state: the generator's state; unused if a seed is given.
        index: the generator's index in the model, so that two Dropout layers differ.
        rank: the worker's rank.
        seed: the user's seed, or None.

    Returns:
        Two values below 2^31, which every backend's seed dtype holds: the mixed seed, and a count of 0.

    Example:
        >>> import numpy as np
        >>> first, second = (mix(np.array([7, 0]), 0, rank, None) for rank in (1, 2))
        >>> bool((first != second).any()), bool((first == mix(np.array([7, 0]), 0, 1, None)).all())
        (True, True)
    """
    source = [int(value) for value in np.asarray(state).reshape(-1)] if seed is None else ["seed", seed]
    digest = hashlib.blake2b(repr((source, index, rank)).encode(), digest_size=4).digest()
    return np.array([int.from_bytes(digest, "little") & 0x7FFFFFFF, 0], np.int64)
