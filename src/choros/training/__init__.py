"""The parts of a run: the job sent to workers, the workers' training loops, the runner of the caller's callbacks."""
