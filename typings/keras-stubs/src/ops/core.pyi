# Tensors of the backend in use: pyright infers a union of the tensors of all backends from the code.
from typing import Any

def convert_to_tensor(
    x: Any, dtype: str | None = None, sparse: bool | None = None, ragged: bool | None = None
) -> Any: ...
def __getattr__(name: str) -> Any: ...
