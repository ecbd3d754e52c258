"""Saving and loading of stages on any file system of Spark: parameters as Spark metadata, the model in Parquet.

Only DataFrames are written, so classic Spark and Spark Connect share the code. The Parquet rows contain a ``.keras``
file.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import MLReader, MLWriter

from choros.errors import InvalidDataError, InvalidInputError, brief

if TYPE_CHECKING:
    import keras

_PART = 64 << 20  # most bytes of the file in one row


class KerasWriter(MLWriter):  # type: ignore[misc]
    """A writer that saves a stage.

    Args:
        stage: a stage with the property ``keras_bytes``.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def save(self, path: str) -> None:
        """Write the stage; replace an existing one only if ``overwrite`` was called."""
        self.saveImpl(path)

    def saveImpl(self, path: str) -> None:
        """Write the stage."""
        spark, stage = self.sparkSession, self.stage
        mode = "overwrite" if self.shouldOverwrite else "error"
        data: bytes = stage.keras_bytes
        parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
        rows = [(number, bytearray(part)) for number, part in enumerate(parts)]
        metadata = {
            "class": f"{type(stage).__module__}.{type(stage).__name__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": spark.version,
            "uid": stage.uid,
            "paramMap": {parameter.name: value for parameter, value in stage._paramMap.items()},
            "defaultParamMap": {parameter.name: value for parameter, value in stage._defaultParamMap.items()},
        }
        text = json.dumps(metadata, separators=(",", ":"))
        root = path.rstrip("/")
        written = spark.createDataFrame([(text,)], "value string").coalesce(1)
        written.write.mode(mode).text(f"{root}/metadata")
        frame = spark.createDataFrame(rows, "part int, keras binary").coalesce(1)
        frame.write.mode(mode).parquet(f"{root}/model")


class KerasReader(MLReader):  # type: ignore[misc,type-arg]
    """A reader that loads a stage.

    Args:
        kind: the class of the stage.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Any:
        """Return the stage.

        Raises:
            InvalidDataError: the path contains a stage of another class.
            InvalidInputError: Keras cannot read the model.
        """
        spark, root = self.sparkSession, path.rstrip("/")
        rows = spark.read.text(f"{root}/metadata").collect()
        metadata = json.loads(rows[0].value)
        name = f"{self.kind.__module__}.{self.kind.__name__}"
        if metadata["class"] != name:
            raise InvalidDataError(f"{path} holds a {metadata['class']}, not a {name}: load it by that class.")
        stage = self.kind()
        stage._resetUid(metadata["uid"])
        stage._setDefault(**metadata["defaultParamMap"])
        stage._set(**metadata["paramMap"])
        stored = {row.part: row.keras for row in spark.read.parquet(f"{root}/model").collect()}
        stage.keras_model = read_keras(b"".join(bytes(stored[part]) for part in sorted(stored)))
        return stage


def written(model: keras.Model) -> bytes:
    """Return a model as the bytes of a ``.keras`` file.

    Args:
        model: keras.Model.

    Raises:
        InvalidInputError: Keras cannot write the model.
    """
    with tempfile.TemporaryDirectory(prefix="choros-") as folder:
        file = Path(folder) / "model.keras"
        try:
            model.save(file)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidInputError(f"Keras cannot write the model {model.name!r}: {brief(error)}.") from error
        return file.read_bytes()


def read_keras(data: bytes) -> keras.Model:
    """Return the model of a ``.keras`` file.

    Raises:
        InvalidInputError: Keras cannot read the model.
    """
    import keras

    with tempfile.TemporaryDirectory(prefix="choros-") as folder:
        file = Path(folder) / "model.keras"
        file.write_bytes(data)
        try:
            return keras.saving.load_model(file)
        except (TypeError, ValueError) as error:
            if "enable_unsafe_deserialization" in str(error):
                raise InvalidInputError(
                    "The saved model has a Lambda layer, whose code Keras only runs where you trust who saved it: call "
                    "keras.config.enable_unsafe_deserialization() first."
                ) from error
            raise InvalidInputError(
                f"Keras cannot read the saved model: {brief(error)}. Classes and functions of your own must be known "
                "by then: register them with keras.saving.register_keras_serializable, or load inside "
                "keras.saving.custom_object_scope({...})."
            ) from error
