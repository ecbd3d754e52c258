"""Tools beside training: ``check``, ``doctor`` and ``demo``."""
