"""Conversion of arrays and tensors of any library to numpy and back, without importing any library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.errors import InvalidInputError
from choros.types import Array, aligned, dtype_of

if TYPE_CHECKING:
    from choros.types import Tensor

Back = Callable[[Array], Any]
_MAX_DLPACK_BYTES = 1 << 16  # for larger arrays the copy costs more than DLPack saves


def arrive(value: Any, name: str | None = None) -> tuple[Array, Back]:
    """Return a value as a numpy array, and a function that converts arrays to the value's library and device.

    Args:
        value: numpy array or scalar, Python number or list, or tensor or variable of Keras, JAX, PyTorch or TensorFlow.
        name: str. The name of the value in errors.

    Raises:
        InvalidInputError: the value is a symbolic tensor, or cannot be an array of numbers.
    """
    library = type(value).__module__.partition(".")[0]
    if library == "keras" and hasattr(value, "value"):
        return arrive(value.value, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, torch)
    if library == "tensorflow":
        if is_symbolic(value):
            raise _symbolic(value, name, "run_eagerly=True or outside of tf.function")
        back = _to_tensorflow if "CPU" in value.device else sys.modules["tensorflow"].convert_to_tensor
        return np.asarray(value.numpy()), back
    if library in ("jax", "jaxlib"):
        module = sys.modules["jax"]
        if is_symbolic(value):
            raise _symbolic(value, name, "outside of jax.jit")
        if not value.committed:  # to no device: JAX may then choose the device of the result, which costs half
            return np.asarray(value), module.numpy.asarray
        device = value.sharding
        return np.asarray(value), lambda out: module.device_put(out, device)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{name or 'The value'} is of type {type(value).__name__}, of which numpy makes no array: {error}"
        ) from None
    if array.dtype.hasobject:
        raise InvalidInputError(
            f"{name or 'The value'} is of type {type(value).__name__}, which holds no numbers: give an array."
        )
    return array, (lambda out: out) if isinstance(value, np.ndarray) else lambda out: out[()] if not out.ndim else out


def is_symbolic(value: Any) -> bool:
    """Return whether a tensor has no values yet because a compiled function is being traced."""
    library = type(value).__module__.partition(".")[0]
    if library == "tensorflow":
        return not hasattr(value, "numpy")
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def _to_tensorflow(out: Array) -> Tensor:
    """Return a tensor with these values on the host; a small one is made by DLPack, which costs half."""
    tensorflow = sys.modules["tensorflow"]
    if out.nbytes > _MAX_DLPACK_BYTES or out.dtype.kind not in "iuf":
        return tensorflow.convert_to_tensor(out)
    aligned_copy = aligned(out.size, out.dtype).reshape(out.shape)
    aligned_copy[...] = out
    return tensorflow.experimental.dlpack.from_dlpack(aligned_copy.__dlpack__())


def _from_torch(value: Any, torch: Any) -> tuple[Array, Back]:
    host = value.detach().cpu()
    device, kind = value.device, value.dtype
    if kind is torch.bfloat16:
        array: Array = host.contiguous().view(torch.int16).numpy().view(dtype_of("bfloat16"))
        return array, lambda out: torch.from_numpy(out.view(np.int16).copy()).view(kind).to(device)
    return host.numpy(), lambda out: torch.from_numpy(np.array(out)).to(device)


def _symbolic(value: Any, name: str | None, where: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name or 'The tensor'} is of type {type(value).__name__} without values yet (inside a compiled function): "
        f"call the collective {where}."
    )
