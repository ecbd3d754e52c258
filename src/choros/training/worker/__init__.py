"""A rank of a fit: its set-up, its training loops and its exchanges."""
