"""Control of asynchronous workers: the control block, the epoch log, the supervisor, recovery, hang detection."""
