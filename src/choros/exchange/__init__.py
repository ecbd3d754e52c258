"""How workers meet: ``Together``, all at once, or ``Alone``, each with the centre in its own time; and when."""

from choros.exchange.alone import Alone
from choros.exchange.memory import MemoryCentre
from choros.exchange.schedule import Schedule
from choros.exchange.together import Together

__all__ = ["Alone", "MemoryCentre", "Schedule", "Together"]
