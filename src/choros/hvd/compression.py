"""Rounding of tensors to half precision before they are summed, by Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.errors import InvalidInputError, warn
from choros.types import Array, dtype_of

_warned: list[bool] = []


class Compressor:
    """Casts values of floating point to a narrower type and back; all others pass.

    It rounds, and saves no bytes: sums are made in the wide type, in which the values travel too.

    Example:
        >>> small, kind = Compression.fp16.compress(np.ones(2, "float32"))
        >>> small.dtype.name, Compression.fp16.decompress(small, kind).dtype.name
        ('float16', 'float32')
    """

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def compress(self, x: Array) -> tuple[Array, Any]:
        """Return the rounded array, and what ``decompress`` needs."""
        wide = x.dtype.kind == "f" and self.kind and x.dtype.itemsize > 2
        return (x.astype(dtype_of(self.kind)) if wide else x), x.dtype

    def decompress(self, x: Array, kind: np.dtype[Any]) -> Array:
        """Return the array in its own type."""
        return x.astype(kind, copy=False)

    def __repr__(self) -> str:
        return {"": "Compression.none", "float16": "Compression.fp16"}.get(self.kind, "Compression.bf16")


def checked(compression: Any) -> Compressor:
    """Return what can compress, or say what to give.

    Raises:
        InvalidInputError: it cannot.
    """
    if not all(hasattr(compression, part) for part in ("compress", "decompress")):
        raise InvalidInputError(f"compression={compression!r}: give hvd.Compression.none, .fp16 or .bf16.")
    fine: Compressor = compression
    return fine


def warn_of_bytes(compression: Compressor, rank: int, size: int) -> None:
    """Warn once on rank 0, where several ranks sum, that a compression saves no bytes."""
    if size > 1 and not (rank or _warned) and isinstance(compression, Compressor) and compression.kind:
        _warned.append(True)
        warn(
            f"{compression} rounds what is summed and saves no bytes: Choros sums in the wide type, in which the "
            "values travel too. Leave it out, unless the rounding itself is wanted."
        )


class Compression:
    """``Compression.none``, ``.fp16`` and ``.bf16``: what values are rounded to before they are summed.

    They save no bytes, other than Horovod's: sums are made in a wider type, in which the values travel too. A mean does
    not overflow.
    """

    none = Compressor()
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")
