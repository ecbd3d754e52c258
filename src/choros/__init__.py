"""Choros: train one Keras 3 model with many workers."""
