"""Launch of processes: ranks of ``choros run`` and ``choros.run``, workers of a Trainer, jobs of schedulers."""
