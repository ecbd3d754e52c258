"""Executors of a fit: on local workers, on ranks that a launcher starts, and inside a running job."""
