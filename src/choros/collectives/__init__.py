"""Named collectives over a ``transport.Group``: checked before they move anything, on arrays and on plain objects.

Knows numpy and groups; nothing of Keras, launchers or backends.
"""

from __future__ import annotations

from choros.collectives.calls import Collectives
from choros.collectives.objects import decode, encode
from choros.collectives.reduce import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Op

__all__ = ["ADASUM", "AVERAGE", "MAX", "MIN", "PRODUCT", "SUM", "Collectives", "Op", "decode", "encode"]
