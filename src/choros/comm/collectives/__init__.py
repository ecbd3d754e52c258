"""Named collectives over a ``transport.Group``: checked before they move anything, on arrays and on plain objects.

Knows numpy and groups; nothing of Keras, launchers or backends.
"""

from __future__ import annotations

from choros.comm.collectives.named import Collectives
from choros.comm.collectives.object_codec import decode, encode
from choros.comm.collectives.reduce_ops import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Op

__all__ = ["ADASUM", "AVERAGE", "MAX", "MIN", "PRODUCT", "SUM", "Collectives", "Op", "decode", "encode"]
