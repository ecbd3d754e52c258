"""Loading of a saved model with its optimizer distributed, and of this rank's rows of a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from choros.backends import inner_optimizer
from choros.cluster import Place
from choros.data.validation import is_whole
from choros.errors import InvalidInputError
from choros.hvd import rank_shard
from choros.hvd.compression import Compression, Compressor
from choros.hvd.context import rank, size
from choros.hvd.fit_patch import reduction_of
from choros.hvd.optimizer import DistributedOptimizer
from choros.hvd.unused_arguments import warn_of_unused


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Return a saved model with its optimizer distributed; the optimizer keeps its slots and its learning rate.

    Args:
        filepath: the path of a ``.keras`` or ``.h5`` file.
        custom_optimizers: optimizer classes that Keras does not know.
        custom_objects: other classes and functions by name.
        compression: see ``DistributedOptimizer``.
        legacy_opts: without effect, with a warning, as Keras 3 has no legacy optimizers.
    """
    warn_of_unused("load_model", "Keras 3 has no legacy optimizers", legacy_opts=legacy_opts)
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    loaded = keras.models.load_model(filepath, custom_objects=known or None)
    # Keras has no annotation here, so pyright infers all that the objects of a file may be.
    model: keras.Model = loaded  # pyright: ignore[reportAssignmentType]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and str(filepath).endswith((".h5", ".hdf5")):
        optimizer = model.optimizer = _with_slots(optimizer, model, str(filepath))
    if optimizer is not None and reduction_of(optimizer) is None:
        DistributedOptimizer(inner_optimizer(optimizer), compression=compression)
    return model


def _with_slots(optimizer: keras.optimizers.Optimizer, model: keras.Model, path: str) -> keras.optimizers.Optimizer:
    """Return a copy of an optimizer with the slots of the HDF5 file: Keras 3.15 builds it without variables."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path) as file:
        group = file.get("optimizer_weights")
        arrays = []
        if isinstance(group, h5py.Group):
            names = [name for key in sorted(group.attrs) for name in np.asarray(group.attrs[key])]
            arrays = [np.array(group[name]) for name in names]
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(model.trainable_variables)
    if len(arrays) != len(fresh.variables):
        return optimizer
    for variable, array in zip(fresh.variables, arrays, strict=True):
        variable.assign(array)
    return fresh


def shard(
    x: object,
    y: object = None,
    sample_weight: object = None,
    *,
    per_rank_batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    training: bool = True,
    steps: int | None = None,
    **unknown: object,
) -> rank_shard.Shard:
    """Return this rank's rows of whole data, as a data set for ``fit``; each row is in one batch of one rank.

    Args:
        x: data as for ``choros.shard``, whole, the same on every rank.
        y: arrays or nested arrays of labels, one for each row; None if ``x`` has them. Defaults to None.
        sample_weight: array of the weight of each row. Defaults to None.
        per_rank_batch_size: int. Rows of one rank's batch; a step trains ``per_rank_batch_size * hvd.size()`` rows.
            ``choros.shard`` takes the rows of all ranks instead. Defaults to 32.
        shuffle: bool. Shuffle rows in each epoch. Defaults to True.
        seed: int. Seed of the order, with the epoch. Defaults to 0.
        training: bool. False is for validation data. Defaults to True.
        steps: int. Global batches in an epoch, if the data have no known length. Defaults to all.
        **unknown: no other keyword is accepted.

    Raises:
        InvalidInputError: the lengths of the data differ, there are fewer rows than ranks, or ``batch_size`` is given,
            which does not say whose rows it counts.
        TypeError: another unknown keyword is given.
    """
    rank_shard.refuse_keywords("hvd.shard", unknown, "per_rank_batch_size= (rows of one rank)")
    if not is_whole(per_rank_batch_size, 1):
        raise InvalidInputError(f"per_rank_batch_size={per_rank_batch_size!r}: give a whole number, 1 or more.")
    return rank_shard.shard(
        x,
        y,
        sample_weight,
        global_batch_size=per_rank_batch_size * size(),
        shuffle=shuffle,
        seed=seed,
        training=training,
        steps=steps,
        place=Place(rank=rank(), size=size()),
    )
