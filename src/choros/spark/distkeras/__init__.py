"""dist-keras' names on Choros: change the import, and a notebook of either of its generations runs.

    >>> import choros.spark.distkeras
    >>> "AEASGD" in choros.spark.distkeras.__all__
    True

What differs, because dist-keras was wrong or is no more: batches are trained to the last row, the batch size is each
worker's own as it was there, ports need not be named, and more workers than the cluster has task slots become as many
as it has, with a warning. ``ADAG`` is what dist-keras shipped under that name, the paper's AGN.
"""

from __future__ import annotations

import importlib
from typing import Any

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

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'choros.spark.distkeras' has no attribute {name!r}")
    return getattr(importlib.import_module(f"choros.spark.distkeras.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
