"""Training and prediction with Keras models on Spark DataFrames, for classic Spark and Spark Connect.

    >>> import choros.spark
    >>> sorted(choros.spark.__all__)
    ['KerasEstimator', 'KerasModel', 'session']

pyspark is imported at the first use of one of these names, Keras at the first use of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from choros.spark.optional_import import import_with_pyspark

if TYPE_CHECKING:
    from choros.spark.estimator import KerasEstimator
    from choros.spark.java import session
    from choros.spark.model import KerasModel

_WHERE = {"KerasEstimator": "estimator", "KerasModel": "model", "session": "java"}

__all__ = ["KerasEstimator", "KerasModel", "session"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'choros.spark' has no attribute {name!r}")
    return getattr(import_with_pyspark(f"choros.spark.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
