"""Serialization of models for workers, and redrawing of initial weights."""
