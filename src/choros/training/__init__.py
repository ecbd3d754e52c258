"""What a run is made of: the job that travels, the worker's loops, the conductor of the caller's callbacks."""
