"""The data sets of the demo."""
