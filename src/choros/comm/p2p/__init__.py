"""Collectives over point-to-point messages."""
