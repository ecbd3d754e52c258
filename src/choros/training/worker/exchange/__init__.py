"""Exchanges of workers: synchronous by all-reduce (``Together``), or asynchronous with a center (``Alone``)."""

from choros.param_server.in_memory import MemoryCentre
from choros.training.worker.exchange.async_exchange import Alone
from choros.training.worker.exchange.sync_exchange import Together
from choros.training.worker.exchange.sync_schedule import Schedule

__all__ = ["Alone", "MemoryCentre", "Schedule", "Together"]
