"""Rounding of tensors to half precision before summation, under Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.errors import InvalidInputError, warn
from choros.types import Array, dtype_of

_warned: list[bool] = []


class Compressor:
    """Cast of floating-point values to a narrower type and back; other values stay unchanged.

    The cast only rounds and saves no bytes: values are sent and summed in the wide type.

    Args:
        kind: str. The narrow dtype, "float16" or "bfloat16"; "" (default) for no cast.

    Example:
        >>> small, kind = Compression.fp16.compress(np.ones(2, "float32"))
        >>> small.dtype.name, Compression.fp16.decompress(small, kind).dtype.name
        ('float16', 'float32')
    """

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def compress(self, x: Array) -> tuple[Array, Any]:
        """Return the rounded array and its original dtype, which ``decompress`` takes."""
        wide = x.dtype.kind == "f" and self.kind and x.dtype.itemsize > 2
        return (x.astype(dtype_of(self.kind)) if wide else x), x.dtype

    def decompress(self, x: Array, kind: np.dtype[Any]) -> Array:
        """Return the array in its original dtype ``kind``."""
        return x.astype(kind, copy=False)

    def __repr__(self) -> str:
        return {"": "Compression.none", "float16": "Compression.fp16"}.get(self.kind, "Compression.bf16")


def checked(compression: Any) -> Compressor:
    """Return ``compression`` if it has the methods of a ``Compressor``.

    Raises:
        InvalidInputError: ``compress`` or ``decompress`` is missing.
    """
    if not all(hasattr(compression, part) for part in ("compress", "decompress")):
        raise InvalidInputError(f"compression={compression!r}: give hvd.Compression.none, .fp16 or .bf16.")
    compressor: Compressor = compression
    return compressor


def warn_of_bytes(compression: Compressor, rank: int, size: int) -> None:
    """Warn once, on rank 0 of several ranks, that a compression saves no bytes."""
    if size > 1 and not (rank or _warned) and isinstance(compression, Compressor) and compression.kind:
        _warned.append(True)
        warn(
            f"{compression} rounds what is summed and saves no bytes: Choros sums in the wide type, in which the "
            "values travel too. Leave it out, unless the rounding itself is wanted."
        )


class Compression:
    """``Compression.none``, ``.fp16`` and ``.bf16``: the type to which values are rounded before summation.

    Unlike Horovod's, they save no bytes: values are sent and summed in a wider type. A mean therefore does not
    overflow.
    """

    none = Compressor()
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")

    def __repr__(self) -> str:
        return "Compression()"
