"""Named collectives over a ``Group``, on arrays and plain objects. The ranks compare each call before any data move.

This package knows numpy and groups, but nothing of Keras, launchers or backends.
"""

from __future__ import annotations

from choros.comm.collectives.named import Collectives
from choros.comm.collectives.object_codec import decode, encode
from choros.comm.collectives.reduce_ops import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Op

__all__ = ["ADASUM", "AVERAGE", "MAX", "MIN", "PRODUCT", "SUM", "Collectives", "Op", "decode", "encode"]
