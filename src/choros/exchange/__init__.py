"""The two ways in which workers exchange: ``Together``, all at once, or ``Alone``, each with the center."""

from choros.exchange.alone import Alone
from choros.exchange.memory import MemoryCentre
from choros.exchange.schedule import Schedule
from choros.exchange.together import Together

__all__ = ["Alone", "MemoryCentre", "Schedule", "Together"]
