"""The training loops of a rank: synchronous, and asynchronous or without exchanges."""
