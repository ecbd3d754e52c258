"""The replica that a worker keeps for the next fit, so that an equal model is not built and compiled again.

Plain Keras keeps its compiled step between two calls of ``fit``, too. A worker gets a pickle of the model for each fit.
If the bytes and the values of metrics are those of the last one, only the values of the other variables differ: the
worker sets them. A replica is kept only if its compiled steps depend on nothing but their inputs and the model's
variables (``Replica.reusable``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from choros.backends import Replica
from choros.training.model_io.serialization import PackedModel
from choros.types import Batch

if TYPE_CHECKING:
    from choros.training.spec import FitConfig

MOST = 256 << 20  # most bytes of a model's variables, which stay in the memory of an idle worker

_kept: list[tuple[str, Replica]] = []  # the key and the replica of the last fit; at most one


def key_of(job: FitConfig, workers: int, written: PackedModel, sample: Batch) -> str | None:
    """Return the key of a fit: fits with equal keys differ only in the values of variables. None: keep no replica.

    Args:
        job: the job.
        workers: int. Number of ranks whose gradients are summed.
        written: the model. With foreign variables, which a step may change, there is no key.
        sample: a batch of the data.
    """
    if job.ensemble or job.layout is not None or written.foreign:
        return None
    import keras

    structure = keras.tree.map_structure(
        lambda array: None if array is None else [str(array.dtype), *array.shape[1:]],
        (sample.x, sample.y, sample.sample_weight),
        none_is_leaf=True,
    )
    # The caller has reset its metrics: values that a reset sets are the same in all fits.
    values = hashlib.blake2b(digest_size=16)
    for array in written.arrays:
        values.update(array.tobytes())
    facts = [job.keras, workers, list(job.averaged_metrics), repr(structure), values.hexdigest()]
    return hashlib.blake2b(json.dumps(facts).encode() + written.code, digest_size=16).hexdigest()


def take(key: str | None) -> Replica | None:
    """Return the kept replica if it has this key; free it if it has another one."""
    while _kept:
        kept_key, replica = _kept.pop()
        if kept_key == key:
            return replica
        replica.close()
    return None


@contextmanager
def kept(key: str | None, replica: Replica | None) -> Iterator[None]:
    """Keep a replica if this context ends without an exception and the replica is reusable; else free it."""
    if replica is None:
        yield
        return
    reset_state = replica.metric_state()
    try:
        yield
        with suppress(Exception):  # of a metric of the user: the fit has ended well
            # Such a metric may also keep values when it is reset. The caller's values would not replace them.
            replica.reset_metrics()
            if (
                key is not None
                and replica.reusable
                and np.array_equal(reset_state, replica.metric_state(), equal_nan=True)
            ):
                _kept.append((key, replica))
    finally:
        if not (_kept and _kept[0][1] is replica):
            replica.close()
