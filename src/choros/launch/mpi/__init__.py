"""Launch of ranks by ``mpiexec`` or ``srun``."""
