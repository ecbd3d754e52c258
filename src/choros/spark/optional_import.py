"""The import of modules that need pyspark, which is an extra."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_with_pyspark(name: str) -> ModuleType:
    """Import a module that imports pyspark.

    Raises:
        ModuleNotFoundError: pyspark is missing; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pyspark":
            raise
        remedy = "pip install 'choros[spark,jax]'"  # or another backend
        raise ModuleNotFoundError(f"pyspark is not installed: {remedy}.", name="pyspark") from error
