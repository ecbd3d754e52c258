"""Launchers and schedulers that machines no longer have: their options in the terms of those of today."""
