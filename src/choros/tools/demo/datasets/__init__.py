"""Data sets of the demo."""
