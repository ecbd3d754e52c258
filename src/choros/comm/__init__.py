"""Process groups: collectives between ranks, in shared memory, over TCP and over MPI."""
