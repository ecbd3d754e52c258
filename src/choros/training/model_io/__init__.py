"""Models as they travel to workers."""
