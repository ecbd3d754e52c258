"""The Params that the estimator and the model share, with Spark's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from choros.errors import InvalidInputError


def param(name: str, words: str, kind: Any = None, least: float | None = None, above: float | None = None) -> Any:
    """Return the declaration of a Param.

    Args:
        name: str. The attribute to which the Param is assigned.
        words: str. The description.
        kind: type converter. By default the value is kept.
        least: smallest permitted number, or None. A smaller value raises InvalidInputError when it is set.
        above: exclusive lower bound, or None. Other values raise InvalidInputError when they are set.
    """
    convert = kind or TypeConverters.identity

    def checked(value: Any) -> Any:
        made = convert(value)
        if least is not None and not made >= least:
            raise InvalidInputError(f"{name}={value!r}: give {least:g} or more ({words}).")
        if above is not None and not made > above:
            raise InvalidInputError(f"{name}={value!r}: give more than {above:g} ({words}).")
        return made

    bounded = least is not None or above is not None
    return Param(Params._dummy(), name, words, checked if bounded else convert)


class ColumnParams(Params):  # type: ignore[misc]
    """Params for the columns that a model reads and writes.

    Columns to read are a name, a list of names, or a dict from the model's names to these. A list has one name for each
    input or output. For a single input or output, the columns of a list are concatenated into one vector.

    Each Param of a subclass has the two methods that stages of Spark have: ``setEpochs(5)``, which returns the stage,
    and ``getEpochs()``, which returns None if there is no value.
    """

    featuresCol = param("featuresCol", "what the model reads: a column, a list of columns, or a dict")
    predictionCol = param("predictionCol", "the class's index, or the predicted value; '' leaves it out")
    probabilityCol = param("probabilityCol", "a vector of probabilities, of classifiers; '' leaves it out")
    rawPredictionCol = param(
        "rawPredictionCol", "a vector of what the model gives, where that is not a probability; '' leaves it out"
    )
    task = param("task", "classification, regression or raw; auto asks the model's loss and last layer")
    predictBatchSize = param("predictBatchSize", "rows of a batch of prediction", TypeConverters.toInt, least=1)
    nulls = param("nulls", "error or drop: what to do with rows that have nulls", TypeConverters.toString)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in dir(cls):
            parameter: Any = getattr(cls, name, None)
            if hasattr(parameter, "typeConverter") and parameter.name == name:  # not by class: sphinx mocks pyspark
                for method in _accessors(parameter):
                    method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                    setattr(cls, method.__name__, method)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            featuresCol="features",
            predictionCol="prediction",
            probabilityCol="probability",
            rawPredictionCol="rawPrediction",
            task="auto",
            predictBatchSize=1024,
            nulls="error",
        )

    def setParams(self, **values: Any) -> Any:
        """Set Params by name; None keeps the present value.

        Raises:
            InvalidInputError: there is no such Param, or a number is out of range.
        """
        for name, value in values.items():
            if not self.hasParam(name):
                known = ", ".join(sorted(parameter.name for parameter in self.params))
                raise InvalidInputError(f"{type(self).__name__} has no parameter {name!r}. It has {known}.")
            if value is not None:
                self._set(**{name: value})
        return self

    def value(self, name: str) -> Any:
        """Return the value of a Param; None if it has no value.

        Raises:
            InvalidInputError: the value is invalid. Spark does not check the values of a parameter grid.
        """
        parameter = self.getParam(name)
        return parameter.typeConverter(self.getOrDefault(parameter)) if self.isDefined(parameter) else None


def _accessors(parameter: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def setter(self: ColumnParams, value: Any) -> Any:
        return self.setParams(**{parameter.name: value})

    def getter(self: ColumnParams) -> Any:
        return self.value(parameter.name)

    title = parameter.name[0].upper() + parameter.name[1:]
    setter.__name__, setter.__doc__ = f"set{title}", f"Set ``{parameter.name}`` ({parameter.doc}). Return the stage."
    getter.__name__, getter.__doc__ = f"get{title}", f"Return ``{parameter.name}``: {parameter.doc}."
    return setter, getter
