"""The table of the zoo: a row a model, with its family and its expected verdict on each backend.

Verdicts: "equal" (weights, optimizer slots and metrics of plain fit), "inexact" (random numbers or batch statistics
that cannot be switched off: within the spread of one process), "refused" (InexactLossError and the like, by name,
before a worker starts), "-" (the example is not for that backend), "library" (the backend's own library fails on such
a batch, or on a share of one row, also in plain fit).
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

BACKENDS = ("jax", "torch", "tensorflow")
ROWS, BATCH = 42, 10  # four batches of 10 and one of 2: shares of 5+5 and 4+3+3, and of 1+1+0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model: a function that makes (model, x, y, sample_weight), and what is expected of it."""

    name: str
    family: str
    make: Callable
    expected: dict
    fast: bool
    options: dict
    about: str


TABLE: dict[str, Entry] = {}


def zoo(family, expect="equal", *, fast=False, **options):
    """Enter a function into the table; ``expect`` is one verdict for all backends, or a dict by backend."""

    def enter(make):
        each = expect if isinstance(expect, dict) else dict.fromkeys(BACKENDS, expect)
        name = make.__name__.replace("_", "-")
        assert name not in TABLE, name
        TABLE[name] = Entry(name, family, make, each, fast, options, (make.__doc__ or "").strip())
        return make

    return enter


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def uniform(*shape, seed=0):
    return rng(seed).uniform(size=(ROWS, *shape)).astype("float32")


def whole(high, *shape, seed=0):
    return rng(seed).integers(0, high, (ROWS, *shape))


def weights(seed=9):
    return rng(seed).uniform(0.5, 2.0, ROWS).astype("float32")


def compiled(model, optimizer="adam", loss="sparse_categorical_crossentropy", metrics=("accuracy",), **how):
    """Compile with Adam at 1e-2 unless told otherwise, and return the model."""
    chosen = keras.optimizers.Adam(1e-2) if optimizer == "adam" else optimizer
    model.compile(optimizer=chosen, loss=loss, metrics=list(metrics), **how)
    return model
