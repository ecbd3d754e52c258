"""Nested structures of arrays: dicts, lists and tuples, with None for missing leaves. No library is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from choros.types import ArrayTree


def is_nested(structure: ArrayTree) -> bool:
    """Return whether ``structure`` is a dict, a list or a tuple.

    Example:
        >>> is_nested({"a": 1}), is_nested(None)
        (True, False)
    """
    return isinstance(structure, dict | list | tuple)


def map_leaves(function: Callable[..., Any], structure: ArrayTree, *others: ArrayTree) -> ArrayTree:
    """Return the structure with ``function(leaf, *leaves of the others)`` at each leaf; None stays None.

    Dicts keep the order of their keys. Lists stay lists, and tuples stay tuples; a named tuple becomes a plain tuple.

    Example:
        >>> map_leaves(lambda n: n * 2, {"b": 1, "a": (2, None)})
        {'b': 2, 'a': (4, None)}
    """
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {key: map_leaves(function, value, *(o[key] for o in others)) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        mapped = [map_leaves(function, value, *(o[i] for o in others)) for i, value in enumerate(structure)]
        return mapped if isinstance(structure, list) else tuple(mapped)
    return function(structure, *others)


def leaves(structure: ArrayTree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of every leaf that is not None. Names are like ``x``, ``x[0]``, ``x['image']``.

    Example:
        >>> list(leaves({"b": 1, "a": (2, None)}, "x"))
        [("x['b']", 1), ("x['a'][0]", 2)]
    """
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(structure, list | tuple):
        for i, value in enumerate(structure):
            yield from leaves(value, f"{name}[{i}]")
    elif structure is not None:
        yield name, structure


def same_shape(a: ArrayTree, b: ArrayTree) -> bool:
    """Return whether two structures have the same containers, keys and positions of leaves; a leaf may be None.

    Example:
        >>> same_shape({"a": 1, "b": 2}, {"a": 3, "b": None}), same_shape([1, 2], [1])
        (True, False)
    """
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_shape(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same_shape, a, b))
    return not is_nested(b)
