"""Checks that all ranks agree: configuration, model, weights, and finite numbers."""
