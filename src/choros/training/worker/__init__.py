"""A rank of a fit: set-up, training loops and exchanges."""
