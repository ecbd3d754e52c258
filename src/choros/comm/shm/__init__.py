"""Communication in shared memory between the processes of a host."""
