"""The import of modules that need pyspark, which is an extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from choros.errors import MissingPackageError

if TYPE_CHECKING:
    from types import ModuleType

_MISSING = "pyspark is not installed: pip install 'choros[spark,jax]'"


def require_pyspark() -> None:
    """Refuse to continue without pyspark.

    Raises:
        MissingPackageError: pyspark is missing; the message has the command that installs it.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise MissingPackageError(f"{_MISSING} (or torch, tensorflow).")


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
        raise ModuleNotFoundError(f"{_MISSING}.", name="pyspark") from error
