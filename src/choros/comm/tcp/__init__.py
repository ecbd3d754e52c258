"""Between hosts without MPI: sockets of our own, which only those who know the job's secret can use."""
