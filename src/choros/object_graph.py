"""The objects that a Python object references, read without running code of its class."""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

_MAX_ITEMS = 10_000  # number of items of a container that are read


def children(parent: object) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object references, each with its path in Python syntax.

    A function references its closure, its defaults, and the globals that it and the functions within it use.

    Args:
        parent: any object.

    Example:
        >>> rate = 0.5
        >>> dict(children(lambda x, power=2: rate * x**power))
        {" (its global 'rate')": 0.5, ' (its default 0)': 2}
        >>> dict(children({"a": 1}))
        {"['a']": 1}
    """
    if isinstance(parent, types.FunctionType):
        for name, cell in zip(parent.__code__.co_freevars, parent.__closure__ or (), strict=True):
            try:
                yield f" (its variable {name!r})", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        for name in global_names(parent):
            yield f" (its global {name!r})", parent.__globals__[name]
        yield from ((f" (its default {number})", value) for number, value in enumerate(parent.__defaults__ or ()))
        yield from ((f" (its default {name!r})", value) for name, value in (parent.__kwdefaults__ or {}).items())
        return
    if isinstance(parent, types.MethodType):
        yield from ((".__self__", parent.__self__), (".__func__", parent.__func__))
    elif isinstance(parent, functools.partial):
        yield from ((".func", parent.func), (".args", parent.args), (".keywords", parent.keywords))
    elif isinstance(parent, (dict, list, tuple, set, frozenset, deque)):
        items = parent.items() if isinstance(parent, dict) else enumerate(parent)
        yield from ((f"[{key!r}]", value) for key, value in itertools.islice(items, _MAX_ITEMS))
    try:
        attributes = object.__getattribute__(parent, "__dict__")
    except AttributeError:
        return
    if isinstance(attributes, dict):
        yield from ((f".{name}", value) for name, value in list(attributes.items()))


def global_names(function: types.FunctionType) -> list[str]:
    """Return the names of the globals that a function and those within it use, sorted.

    Args:
        function: a Python function.
    """
    return sorted(attribute_names(function) & function.__globals__.keys())


def attribute_names(function: types.FunctionType) -> set[str]:
    """Return the names of globals and attributes that a function and those within it use.

    Args:
        function: a Python function.
    """
    return _names(function.__code__)


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and those within it use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
