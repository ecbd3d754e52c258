"""The parts of a run: the job that travels, the worker's loops, the conductor of the caller's callbacks."""
