"""The tools ``check``, ``doctor`` and ``demo``."""
