"""Codec of control messages: frozen dataclasses to JSON and arrays, and back with a check of each field. No pickle."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.types import Array  # it imports numpy, which a process that only starts others does not need

KIND = "op"  # key of a message's kind in its header: the name of its class
_T = TypeVar("_T")
_JSON_TYPES = (bool, int, float, str, type(None))  # types of a field whose value must have exactly this type


class Client(Protocol):
    """An end of a connection that sends requests: ``RpcConnection`` or ``ReconnectingClient``."""

    def request(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> tuple[dict[str, Any], list[Array]]:
        """Send a request; return the reply."""
        ...


@dataclass(frozen=True)
class Done:
    """The reply to a request without a result."""


class Messages:
    """The messages that one end of a protocol accepts.

    Args:
        kinds: frozen dataclasses. A field is a bool, int, float, str or None, a list, tuple or dict of these, or
            another dataclass of such fields. A field of type ``Array`` is sent as an array. One field may be a
            ``list[Array]``: it has the arrays after those of the other fields.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Add:
        ...     epoch: int
        ...     rank: int
        >>> messages = Messages(Add)
        >>> encode(Add(epoch=1, rank=0))
        ({'op': 'Add', 'epoch': 1, 'rank': 0}, [])
        >>> messages.decode({"op": "Add", "epoch": 1, "rank": 0}, [])
        Add(epoch=1, rank=0)
        >>> messages.decode({"op": "Add", "epoch": "1", "rank": 0}, [])
        Traceback (most recent call last):
        choros.errors.InvalidInputError: Message Add: field epoch must be int, and is '1'.
    """

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds
        self._kinds = {kind.__name__: kind for kind in kinds}
        if len(self._kinds) != len(kinds):
            raise InvalidInputError("Two messages have the same name: " + ", ".join(kind.__name__ for kind in kinds))

    def has(self, header: dict[str, Any]) -> bool:
        """Return whether a header is that of one of these messages."""
        kind = header.get(KIND)
        return isinstance(kind, str) and kind in self._kinds

    def decode(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> Any:
        """Return the message of a header and its arrays.

        Raises:
            InvalidInputError: the kind is unknown, or a field is missing, unknown or of another type.
        """
        if not self.has(header):
            raise InvalidInputError(f"Unknown message {_brief(header.get(KIND))}: one of {', '.join(self._kinds)}.")
        return decode(self._kinds[header[KIND]], header, arrays)


class Router:
    """The replies of an end that serves several protocols over one connection.

    Args:
        protocols: the requests of each protocol, and the function that returns the reply to one of them, as a message.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Double:
        ...     value: int
        >>> router = Router((Messages(Double), lambda request: Double(2 * request.value)))
        >>> router.handle({"op": "Double", "value": 3}, [])
        ({'op': 'Double', 'value': 6}, [])
    """

    def __init__(self, *protocols: tuple[Messages, Callable[[Any], object]]) -> None:
        self._replies = {kind: reply for messages, reply in protocols for kind in messages.kinds}
        self._messages = Messages(*(kind for messages, _ in protocols for kind in messages.kinds))

    def handle(self, header: dict[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Return the reply to a request; a handler for ``RpcConnection.serve``.

        Raises:
            InvalidInputError: as in ``Messages.decode``.
        """
        request = self._messages.decode(header, arrays)
        return encode(self._replies[type(request)](request))


def encode(message: Any) -> tuple[dict[str, Any], list[Array]]:
    """Return the header of a message, as plain JSON, and its arrays."""
    shape = _shape(type(message))
    header = {KIND: type(message).__name__, **{name: _plain(getattr(message, name)) for name in shape.plain}}
    arrays = [getattr(message, name) for name in shape.arrays]
    if shape.rest is not None:
        arrays += getattr(message, shape.rest)
    return header, arrays


def header_of(message: Any) -> dict[str, Any]:
    """Return the header of a message without arrays."""
    return encode(message)[0]


def decode(kind: type[_T], header: dict[str, Any], arrays: Sequence[Array] = ()) -> _T:
    """Return the message of one kind from its header and arrays.

    Raises:
        InvalidInputError: it is another message, or a field is missing, unknown or of another type.
    """
    if not isinstance(header, dict):  # JSON of a peer may be of any type
        raise InvalidInputError(f"{_brief(header)} in place of the message {kind.__name__}.")
    if header.get(KIND) != kind.__name__:
        raise InvalidInputError(f"Message {_brief(header.get(KIND))} in place of {kind.__name__}.")
    where = f"Message {kind.__name__}"
    shape = _shape(kind)
    count = len(shape.arrays)
    if len(arrays) < count or (shape.rest is None and len(arrays) > count):
        qualifier = "" if shape.rest is None else "at least "
        raise InvalidInputError(f"{where} has {len(arrays)} arrays, and must have {qualifier}{count}.")
    vectors: dict[str, Any] = dict(zip(shape.arrays, arrays[:count], strict=True))
    if shape.rest is not None:
        vectors[shape.rest] = list(arrays[count:])
    values = {name: value for name, value in header.items() if name != KIND}
    return _build(kind, values, where, vectors)


def ask(client: Client, message: Any, reply: type[_T]) -> _T:
    """Send a message, and return the reply, which is of the kind ``reply``.

    Raises:
        InvalidInputError: the reply is another message.
        ChorosError: as in ``RpcConnection.request``.
    """
    return decode(reply, *client.request(*encode(message)))


@dataclass(frozen=True)
class _Shape:
    """The fields of a dataclass: those of JSON with their types, the arrays, the list of further arrays, if any."""

    plain: dict[str, Any]
    arrays: tuple[str, ...]
    rest: str | None
    required: frozenset[str]


_shapes: dict[type, _Shape] = {}  # a cache: to derive a shape takes longer than to encode a message


def _shape(kind: Any) -> _Shape:
    if kind not in _shapes:
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        _shapes[kind] = _Shape(
            {name: hints[name] for name in names if not _is_array(hints[name]) and not _is_array_list(hints[name])},
            tuple(name for name in names if _is_array(hints[name])),
            next((name for name in names if _is_array_list(hints[name])), None),
            frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING),
        )
    return _shapes[kind]


def _is_array(hint: Any) -> bool:
    """Return whether a field's type is ``choros.types.Array``. It compares names, as numpy may not be imported."""
    origin = get_origin(hint)
    return origin is not None and (origin.__module__, origin.__name__) == ("numpy", "ndarray")


def _is_array_list(hint: Any) -> bool:
    return get_origin(hint) is list and _is_array(get_args(hint)[0])


def _build(kind: type[_T], values: Any, where: str, arrays: dict[str, Any]) -> _T:
    if not isinstance(values, dict):
        raise InvalidInputError(f"{where} must be an object of fields, and is {_brief(values)}.")
    shape = _shape(kind)
    # An unknown field is an error and is not dropped: it means that the other end runs another version.
    if unknown := values.keys() - shape.plain.keys():
        raise InvalidInputError(f"{where} has no field {_brief(min(map(str, unknown)))}.")
    if missing := shape.required - values.keys() - arrays.keys():
        raise InvalidInputError(f"{where} lacks the field {min(missing)}.")
    checked = {name: _checked(value, shape.plain[name], f"{where}: field {name}") for name, value in values.items()}
    return kind(**checked, **arrays)


def _checked(value: Any, hint: Any, where: str) -> Any:
    """Return a value of JSON as the type of its field.

    Raises:
        InvalidInputError: the value has another type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if hint in _JSON_TYPES:
        # JSON has one type of number: 1.0 may arrive as 1. A bool is not a number.
        number = hint is float and type(value) is int
        if type(value) is hint or number:
            return float(value) if number else value
    elif origin in (Union, types.UnionType):
        for option in args:
            try:
                return _checked(value, option, where)
            except InvalidInputError:
                continue
    elif origin is Literal:
        if any(type(value) is type(option) and value == option for option in args):
            return value
    elif is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where, {})
    elif origin is dict and isinstance(value, dict):
        return {key: _checked(item, args[1], f"{where}[{key!r}]") for key, item in value.items()}
    elif origin is list and isinstance(value, list):
        return [_checked(item, args[0], f"{where}[{index}]") for index, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(_checked(item, option, where) for item, option in zip(value, args, strict=True))
    raise InvalidInputError(f"{where} must be {getattr(hint, '__name__', hint)}, and is {_brief(value)}.")


def _plain(value: Any) -> Any:
    """Return a field's value as plain JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _shape(type(value)).plain}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
