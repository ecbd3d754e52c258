"""Exchanges of workers: ``SyncExchange`` by all-reduce, ``AsyncExchange`` with a center."""

from choros.param_server.in_memory import InMemoryParameterServer
from choros.training.worker.exchange.async_exchange import AsyncExchange
from choros.training.worker.exchange.sync_exchange import SyncExchange
from choros.training.worker.exchange.sync_schedule import Schedule

__all__ = ["AsyncExchange", "InMemoryParameterServer", "Schedule", "SyncExchange"]
