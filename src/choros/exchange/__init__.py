"""Exchanges of workers: synchronous by all-reduce (``Together``), or asynchronous with a center (``Alone``)."""

from choros.exchange.alone import Alone
from choros.exchange.memory import MemoryCentre
from choros.exchange.schedule import Schedule
from choros.exchange.together import Together

__all__ = ["Alone", "MemoryCentre", "Schedule", "Together"]
