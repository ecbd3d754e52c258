"""The text of an object's ``repr``: a short call of its constructor, without data."""

from __future__ import annotations

import re
import reprlib
from typing import Any

_ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>")


class _Shortener(reprlib.Repr):
    """A ``repr`` that shortens containers, and replaces arrays by their type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 300

    def repr_function(self, x: Any, level: int) -> str:
        """Return the name of a function."""
        return str(x.__qualname__).rpartition("<locals>.")[2]

    repr_builtin_function_or_method = repr_function

    def repr_instance(self, x: Any, level: int) -> str:
        """Return type and shape of an array, and no address of any object."""
        if getattr(x, "shape", ()) and hasattr(x, "dtype"):
            return f"<{type(x).__name__} {tuple(x.shape)} {getattr(x.dtype, 'name', x.dtype)}>"
        text = super().repr_instance(x, level)
        return f"<{type(x).__name__}>" if _ADDRESS.fullmatch(text) else text


_shortener = _Shortener()


def call_text(target: object, /, *values: object, **options: object) -> str:
    """Return ``Class(value, option=value)`` with the class of ``target``. Options that are None are left out.

    Args:
        target: object. Its class is named.
        *values: the positional arguments.
        **options: the arguments by name.

    Example:
        >>> call_text(ValueError(), "n1:2", every=3, keep=None)
        "ValueError('n1:2', every=3)"
    """
    arguments = [value_text(value) for value in values]
    arguments += [f"{name}={value_text(value)}" for name, value in options.items() if value is not None]
    return f"{type(target).__name__}({', '.join(arguments)})"


def value_text(value: object) -> str:
    """Return the text of one argument.

    Example:
        >>> value_text(len), value_text([object()])
        ('len', '[<object>]')
    """
    return _shortener.repr(value)
