# Keras returns what the file holds: pyright infers a union with None from the code.
from collections.abc import Mapping
from os import PathLike
from typing import Any

from keras import Model

def load_model(
    filepath: str | PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Model: ...
def __getattr__(name: str) -> Any: ...
