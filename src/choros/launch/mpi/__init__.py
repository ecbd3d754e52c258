"""Start of ranks by ``mpiexec`` or ``srun``."""
