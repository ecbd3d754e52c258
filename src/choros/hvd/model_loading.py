"""Loading in a script: a saved model with its optimizer distributed, and this rank's rows of a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from choros.cluster import Place
from choros.hvd import rank_shard
from choros.hvd.compression import Compression, Compressor
from choros.hvd.context import rank, size
from choros.hvd.fit_patch import reduction_of
from choros.hvd.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer is distributed, with its slots and its rate as they were.

    Args:
        filepath: ``.keras`` or ``.h5``.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions by name.
        compression: see ``DistributedOptimizer``.
        legacy_opts: ignored, as Keras 3 has no other optimizers.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and str(filepath).endswith((".h5", ".hdf5")):
        optimizer = model.optimizer = _with_slots(optimizer, model, str(filepath))
    if optimizer is not None and reduction_of(optimizer) is None:
        DistributedOptimizer(getattr(optimizer, "inner_optimizer", optimizer), compression=compression)
    return model


def _with_slots(optimizer: Any, model: Any, path: str) -> Any:
    """An optimizer like the one that Keras loaded from HDF5, with its slots: Keras 3.15 builds it without variables."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path) as file:
        group = file.get("optimizer_weights", {})
        names = [name for key in sorted(getattr(group, "attrs", {})) for name in group.attrs[key]]
        arrays = [np.array(group[name]) for name in names]
    anew = type(optimizer).from_config(optimizer.get_config())
    anew.build(model.trainable_variables)
    if len(arrays) != len(anew.variables):
        return optimizer
    for variable, array in zip(anew.variables, arrays, strict=True):
        variable.assign(array)
    return anew


def shard(  # noqa: D417 - what belongs together is named together
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int = 32, **how: Any
) -> rank_shard.Shard:
    """Return this rank's rows of whole data, as a data set for ``fit``; exact also where nothing divides.

    Args:
        x, y, sample_weight: as for ``choros.shard``, whole, the same on every rank.
        batch_size: int. Rows of one rank's batch: all ranks together train ``batch_size * hvd.size()`` rows a step.
        **how: ``shuffle`` (True), ``seed`` (0), ``training`` (True; False for validation data), and ``steps`` of an
            epoch where the data do not tell.

    Raises:
        InvalidInputError: data that do not fit together, or fewer rows than ranks.
    """
    place = Place(rank=rank(), size=size())
    return rank_shard.shard(x, y, sample_weight, batch_size=batch_size * size(), place=place, **how)
