"""All models of the zoo, entered into the table."""

from tests.zoo import generative, structured, text, training, vision

__all__ = ["generative", "structured", "text", "training", "vision"]
