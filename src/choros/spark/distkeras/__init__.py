"""The API of dist-keras on Choros. Change the import, and a notebook for either generation of dist-keras runs.

    >>> import choros.spark.distkeras
    >>> "AEASGD" in choros.spark.distkeras.__all__
    True

Differences from dist-keras: all rows are trained, also those of a last small batch. Ports need not be named. If there
are more workers than task slots, the number of workers is reduced, with a warning. The batch size is that of each
worker, as in dist-keras. ``ADAG`` is the rule that dist-keras shipped under this name, which is the paper's AGN.
"""

from __future__ import annotations

from typing import Any

from choros.spark.optional_import import import_with_pyspark

_WHERE = {
    **dict.fromkeys(
        (
            "Trainer",
            "SingleTrainer",
            "AveragingTrainer",
            "EnsembleTrainer",
            "EASGD",
            "AEASGD",
            "AsynchronousEASGD",
            "EAMSGD",
            "AsynchronousEAMSGD",
            "DOWNPOUR",
            "ADAG",
            "DynSGD",
            "Experimental",
        ),
        "trainers",
    ),
    **dict.fromkeys(
        (
            "MinMaxTransformer",
            "BinaryLabelTransformer",
            "StandardTransformer",
            "DenseTransformer",
            "ReshapeTransformer",
            "OneHotTransformer",
            "LabelVectorTransformer",
            "LabelVectorTransformerUDF",
            "LabelIndexTransformer",
        ),
        "transformers",
    ),
    **dict.fromkeys(("Predictor", "ModelPredictor"), "predictors"),
    **dict.fromkeys(("Evaluator", "AccuracyEvaluator"), "evaluators"),
    **dict.fromkeys(("shuffle", "precache", "history_executors_average", "history_executor"), "utils"),
}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll] - names of lazy imports


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'choros.spark.distkeras' has no attribute {name!r}")
    return getattr(import_with_pyspark(f"choros.spark.distkeras.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
