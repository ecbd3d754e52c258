"""The parts that need TensorFlow: calls to the host from graphs, batches of iterators, the tape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from choros.hvd.tensor_conversion import is_symbolic
from choros.types import Array


def operate(
    value: tf.Tensor,
    forward: Callable[[Any], Any],
    host: Callable[[Array], Array],
    gradient: Callable[[Any], Any],
    shape: Any,
) -> tf.Tensor:
    """Return ``host(value)``, by ``forward`` if eager, else by a graph node; see ``choros.hvd.host_ops.operate``."""

    def run_host(tensor: tf.Tensor) -> tf.Tensor:
        if not is_symbolic(tensor):
            return forward(tensor)
        out = tf.numpy_function(host, [tensor], tensor.dtype)
        out.set_shape(shape(tuple(tensor.shape)) if tensor.shape.rank is not None else None)
        return out

    tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    if not (tensor.dtype.is_floating and _recorded(tensor)):
        return run_host(tensor)
    return tf.custom_gradient(lambda tensor: (run_host(tensor), gradient))(tensor)


def _recorded(tensor: tf.Tensor) -> bool:
    """Return whether a gradient may be requested: in a graph, or if a tape may record.

    Recording costs as much as a small collective. Only a private function of TensorFlow reports tapes; if it is
    missing, this returns True.
    """
    if is_symbolic(tensor):
        return True
    try:
        from tensorflow.python.eager import record

        return bool(record.could_possibly_record())
    except (ImportError, AttributeError):
        return True


def call_back(host: Callable[..., list[Array]], tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Call the host; see ``choros.hvd.host_ops.call_back``."""
    due, *out = tf.numpy_function(host, tensors, [tf.bool, *(t.dtype for t in tensors)])
    due.set_shape(())
    for value, tensor in zip(out, tensors, strict=True):
        value.set_shape(tensor.shape)
    return due, out


def next_batch(iterator: Any) -> Any:
    """Return the next batch, with None for absent optional parts; return None at the end."""
    data = next(iter(iterator), None)
    if data is None:
        return None
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)


@contextmanager
def untuned_pipelines() -> Iterator[None]:
    """Make Keras build its pipelines of arrays and PyDatasets without tf.data's autotuning, within the context.

    The tuning thread doubles its sleep each time, and the end of an epoch waits until it wakes. These seconds differ
    between ranks, and the other ranks wait too. A ``tf.data.Dataset`` of the user is not changed.
    """
    from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter

    def untuned(plain: Any) -> Any:
        @functools.wraps(plain)
        def get_tf_dataset(self: Any) -> Any:
            options = tf.data.Options()
            options.autotune.enabled = False
            return plain(self).with_options(options)

        return get_tf_dataset

    adapters: list[type[Any]] = [array_data_adapter.ArrayDataAdapter, py_dataset_adapter.PyDatasetAdapter]
    before = [adapter.get_tf_dataset for adapter in adapters]
    for adapter, plain in zip(adapters, before, strict=True):
        adapter.get_tf_dataset = untuned(plain)
    try:
        yield
    finally:
        for adapter, plain in zip(adapters, before, strict=True):
            adapter.get_tf_dataset = plain


def reducing(gradtape: object, reduce: Callable[[list[Any], list[Any]], list[Any]], local: list[Any]) -> Any:
    """Return a tape that reduces the gradients of ``gradtape``.

    Args:
        gradtape: tf.GradientTape.
        reduce: function from gradients and sources to reduced gradients.
        local: list to which ``register_local_source`` appends variables.
    """

    class Tape(tf.GradientTape):  # type: ignore[misc]
        """The given tape, with reduced gradients."""

        def __init__(self) -> None:
            self.__dict__ = gradtape.__dict__

        def __repr__(self) -> str:
            return f"DistributedGradientTape(<{type(gradtape).__name__}>)"

        def gradient(
            self,
            target: Any,
            sources: Any,
            output_gradients: list[tf.Tensor] | None = None,
            unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        ) -> Any:
            gradients = keras.tree.flatten(
                super().gradient(target, sources, output_gradients, unconnected_gradients=unconnected_gradients)
            )
            return keras.tree.pack_sequence_as(sources, reduce(gradients, keras.tree.flatten(sources)))

        def register_local_source(self, source: object) -> None:
            """Exclude a variable's gradients from the reduction."""
            local.append(source)

    return Tape()
