"""Executors of a fit: local workers, remote ranks, a job that runs already."""
