"""The columns that a model learns from, and the projection that makes arrays of them before rows leave the JVM.

Vectors (dense or sparse), arrays, scalars, images and bytes become columns that Arrow hands over as they lie in memory.
What cannot work is said from the schema alone: no job is started for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from choros.errors import InvalidDataError, InvalidInputError
from choros.spark.task_slots import setting

MARK = "choros_v"  # the column that says which rows validate
_WHOLE = {"byte": "int", "short": "int", "integer": "int", "int": "int", "long": "bigint", "bigint": "bigint"}
_REAL = {"float": "float32", "double": "float64"}
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class ColumnSpec:
    """One array of a model's input or target, and the columns that it is made of.

    Attributes:
        name: str. The column of the normalised frame.
        columns: tuple of str. The columns of the given frame.
        kind: "number", "list", "bytes" or "image": how Arrow brings it.
        shape: tuple or None. What a row is reshaped to; None leaves it as it comes.
        classes: int or None. How many classes there are, of labels that are class numbers.
        ignored: int or None. A number that is no class, and which the loss leaves out.
    """

    name: str
    columns: tuple[str, ...]
    kind: str
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    ignored: int | None = None

    @property
    def said(self) -> str:
        """The columns in words."""
        return f"the column {self.columns[0]!r}" if len(self.columns) == 1 else f"the columns {list(self.columns)}"


@dataclass(frozen=True)
class Columns:
    """The meaning of the columns of a normalised frame.

    Attributes:
        leaves: dict from name to Leaf, in the order of the frame's columns.
        x, y, weight: names nested as the model takes them; ``y`` and ``weight`` may be None.
        marked: bool. Whether the column ``MARK`` says which rows validate.
    """

    leaves: dict[str, ColumnSpec]
    x: Any
    y: Any = None
    weight: Any = None
    marked: bool = False


@dataclass
class _Maker:
    frame: Any
    floatx: str
    leaves: dict[str, ColumnSpec] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)

    def nested(self, asked: Any, letter: str, shapes: Sequence[tuple[str, Shape]] | None, what: str) -> Any:
        """Names of leaves, nested as they were asked for."""
        if isinstance(asked, Mapping):
            by_name = dict(shapes or ())
            if by_name and set(by_name) != set(asked) and len(by_name) == len(asked):
                raise InvalidDataError(
                    f"{what} names {sorted(asked)}, but the model has {sorted(by_name)}: give these names."
                )
            return {name: self.leaf(one, letter, by_name.get(name), what) for name, one in asked.items()}
        several = isinstance(asked, Sequence) and not isinstance(asked, str)
        if shapes is not None and len(shapes) > 1:
            if not several or len(asked) != len(shapes):
                raise InvalidDataError(
                    f"{what}={asked!r}, but the model has {len(shapes)} of them ({[name for name, _ in shapes]}): give "
                    "a list with one for each, or a dict from these names to columns."
                )
            return [self.leaf(one, letter, shape, what) for one, (_, shape) in zip(asked, shapes, strict=True)]
        return self.leaf(asked, letter, shapes[0][1] if shapes else None, what)

    def leaf(self, asked: Any, letter: str, shape: Shape | None, what: str) -> str:
        """Make one array of one or several columns; return its name."""
        given = (asked,) if isinstance(asked, str) else tuple(asked) if isinstance(asked, Sequence) else ()
        if not given or not all(isinstance(one, str) and one for one in given):
            raise InvalidDataError(f"{what}={asked!r}: give a column's name, a list of names, or a dict of these.")
        columns = tuple(self.find(one, what) for one in given)
        name = f"choros_{letter}{len(self.leaves)}"
        if len(columns) == 1:
            kind, made = self.one(columns[0], what)
        else:
            kind, made = "list", self.together(columns, what)
        fixed = tuple(int(size) for size in shape if size) if shape is not None and all(shape) else None
        self.leaves[name] = ColumnSpec(name, columns, kind, fixed)
        self.made.append(made.alias(name))
        return name

    def find(self, name: str, what: str) -> str:
        """The column's own name."""
        names, same = self.frame.columns, letters(self.frame)
        twice = [other for other in names if same(other) == same(name)]
        if len(twice) > 1:
            raise InvalidDataError(
                f"{what}: the frame has {len(twice)} columns that Spark takes for {name!r} ({', '.join(twice)}): "
                "rename all but one (toDF), or drop them."
            )
        if name in names:
            return name
        alike = [other for other in names if other.lower() == name.lower()]
        if len(alike) == 1:
            return str(alike[0])
        near = difflib.get_close_matches(name, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise InvalidDataError(f"{what}: the frame has no column {name!r}{hint} It has {', '.join(names)}.")

    def one(self, name: str, what: str) -> tuple[str, Any]:
        """Return how a column travels, and the expression for it."""
        column, kind = F.col(quoted(name)), self.frame.schema[name].dataType
        if is_vector(kind):
            return "list", self.vector(column)
        if isinstance(kind, T.BinaryType):
            return "bytes", column
        if is_image(kind):
            return "image", column
        if isinstance(kind, T.ArrayType):
            inside, depth = kind.elementType, 1
            while isinstance(inside, T.ArrayType):
                inside, depth = inside.elementType, depth + 1
            wanted = "array<" * depth + self.number(inside, name, what) + ">" * depth
            return "list", column if kind.simpleString() == wanted else column.cast(wanted)
        return "number", column.cast(self.number(kind, name, what))

    def together(self, columns: tuple[str, ...], what: str) -> Any:
        """One array of several columns, numbers and vectors alike."""
        kinds = {name: self.frame.schema[name].dataType for name in columns}
        inside = {n: k.elementType if isinstance(k, T.ArrayType) else k for n, k in kinds.items()}
        real = "double" if self.floatx == "float64" else "float"
        found = {real if is_vector(kind) else self.number(kind, name, what) for name, kind in inside.items()}
        wanted = found.pop() if len(found) == 1 else "bigint" if found == {"int", "bigint"} else real
        parts, run = [], list[Any]()
        for name, kind in kinds.items():
            column = F.col(quoted(name))
            if is_vector(kind) or isinstance(kind, T.ArrayType):
                if run:
                    parts.append(F.array(*run))
                    run = []
                parts.append(self.vector(column) if is_vector(kind) else column.cast(f"array<{wanted}>"))
            else:
                run.append(column.cast(wanted))
        if run:
            parts.append(F.array(*run))
        return parts[0] if len(parts) == 1 else F.concat(*parts)

    def vector(self, column: Any) -> Any:
        """An array of a vector, sparse or dense; nothing of nothing."""
        from pyspark.ml.functions import vector_to_array

        dtype = "float64" if self.floatx == "float64" else "float32"
        return F.when(column.isNotNull(), vector_to_array(column, dtype))

    def number(self, kind: Any, name: str, what: str) -> str:
        """Spark's type for numbers of a type: whole ones stay whole."""
        said = kind.typeName()
        if said in _WHOLE:
            return _WHOLE[said]
        if said in ("float", "double", "decimal", "boolean"):
            return "double" if self.floatx == "float64" else "float"
        if said == "string":
            raise InvalidDataError(
                f"{what}: the column {name!r} holds text, which a model cannot take: make numbers of it with "
                "StringIndexer (classes) or cast('float')."
            )
        raise InvalidDataError(
            f"{what}: the column {name!r} is of type {kind.simpleString()}: give numbers, vectors, arrays of numbers, "
            "bytes or Spark's images."
        )


def normalise(
    frame: Any,
    features: Any,
    label: Any = None,
    weight: Any = None,
    validation: float | str | None = None,
    *,
    inputs: Sequence[tuple[str, Shape]] | None = None,
    outputs: Sequence[tuple[str, Shape]] | None = None,
    seed: int = 0,
    floatx: str = "float32",
    nulls: str = "error",
    keep: bool = False,
) -> tuple[Any, Columns]:
    """Return a frame of nothing but arrays, numbers and bytes, and what its columns mean.

    Args:
        frame: DataFrame, classic or of Connect.
        features: a column's name; a list of names: one for each input of a model with several inputs, else put together
            into one vector; or a dict from the model's inputs to these.
        label: the same of the outputs; None leaves targets out.
        weight: name of a column of sample weights, or a list or dict of them as the outputs are; or None.
        validation: the share of rows to validate with, drawn by ``seed``; or the name of a column that is true for
            them; or None.
        inputs: the model's, each with its name and the shape of a row, None where a size is free. Rows of as many
            numbers are reshaped to it.
        outputs: the model's, in the same way.
        seed: int.
        floatx: what floating point numbers become.
        nulls: "error" stops at the first row with a null; "drop" leaves such rows out.
        keep: bool. Whether the frame's own columns stay, before those that are made.

    Raises:
        InvalidInputError: no DataFrame of Spark.
        InvalidDataError: a column is missing, there twice, or holds what a model cannot take. No job was started.

    Example:
        >>> frame, columns = normalise(frame, "features", "label")
        >>> columns.x, columns.y
        ('choros_x0', 'choros_y1')
    """
    check_frame(frame)
    if nulls not in ("error", "drop"):
        raise InvalidDataError(f"nulls={nulls!r}: give 'error' or 'drop'.")
    if label is not None and getattr(frame, "isStreaming", False):
        raise InvalidDataError("The frame is a stream, which has no end to train to: train on what foreachBatch gives.")
    maker = _Maker(frame, floatx)
    x = maker.nested(features, "x", inputs, "features")
    y = None if label is None else maker.nested(label, "y", outputs and [(n, (None,)) for n, _ in outputs], "label")
    weights: Any = None
    if weight is not None:
        names = [weight] if isinstance(weight, str) else list(dict(weight).values() if is_map(weight) else weight)
        for name in names:
            kind = frame.schema[maker.find(name, "weight")].dataType
            if kind.typeName() not in (*_WHOLE, *_REAL, "decimal"):
                raise InvalidDataError(
                    f"weight: the column {name!r} is of type {kind.simpleString()}: give one number a row."
                )
        if isinstance(weight, str):
            weights = maker.leaf(weight, "w", None, "weight")
        elif is_map(weight):
            weights = {key: maker.leaf(name, "w", None, "weight") for key, name in weight.items()}
        else:
            weights = [maker.leaf(name, "w", None, "weight") for name in weight]
    mark = _mark(maker, validation, seed)
    if nulls == "drop":
        used = sorted({column for leaf in maker.leaves.values() for column in leaf.columns})
        frame = frame.dropna(subset=[quoted(name) for name in used])
        for name in used:
            if (holed := _holed(F.col(quoted(name)), frame.schema[name].dataType)) is not None:
                frame = frame.filter(~holed)
    made = frame.select(*(["*"] if keep else []), *maker.made, *([] if mark is None else [mark.alias(MARK)]))
    return made, Columns(maker.leaves, x, y, weights, mark is not None)


def _holed(column: Any, kind: Any) -> Any:
    """Return whether an array has a null in it, as an expression; None where its type has none."""
    if not isinstance(kind, T.ArrayType):
        return None
    deeper = isinstance(kind.elementType, T.ArrayType)
    if not (kind.containsNull or deeper):
        return None

    def hole(one: Any) -> Any:
        inside = _holed(one, kind.elementType)
        return one.isNull() if inside is None else one.isNull() | inside

    return F.exists(column, hole)


def _mark(maker: _Maker, validation: float | str | None, seed: int) -> Any:
    if not validation:
        return None
    if isinstance(validation, str):
        name = maker.find(validation, "validation")
        if maker.frame.schema[name].dataType.typeName() != "boolean":
            raise InvalidDataError(f"validation: the column {name!r} is not boolean: make one with (column > 0).")
        return F.coalesce(F.col(quoted(name)), F.lit(False))
    if not 0.0 < validation < 1.0:
        raise InvalidDataError(
            f"validation={validation!r}: give a share of the rows from 0 to below 1, or a boolean column."
        )
    return F.rand(seed) < F.lit(float(validation))


def check_frame(frame: Any) -> None:
    """Refuse what is no DataFrame of Spark, such as one of pandas.

    Raises:
        InvalidInputError: says how to make one.
    """
    if not all(hasattr(frame, one) for one in ("sparkSession", "mapInArrow")):
        kind = f"{type(frame).__module__.partition('.')[0]}.{type(frame).__name__}"
        raise InvalidInputError(
            f"The rows are a {kind}, not a DataFrame of Spark: make one, session.createDataFrame(frame), or train "
            "arrays by choros.Trainer(model, launcher=choros.Spark())."
        )


def letters(frame: Any) -> Callable[[str], str]:
    """Return what makes one of two columns' names that are the same to Spark: as its session minds case or not."""
    minds = setting(frame.sparkSession, "spark.sql.caseSensitive", "false").lower() == "true"
    return str if minds else str.lower


def is_map(thing: Any) -> bool:
    """Return whether a thing has names and values."""
    return isinstance(thing, Mapping)


def quoted(name: str) -> str:
    """Return a column's name as Spark reads it back, whatever is in it.

    Example:
        >>> quoted("a.b")
        '`a.b`'
    """
    return "`" + name.replace("`", "``") + "`"


def is_vector(kind: Any) -> bool:
    """Return whether a type is Spark ML's (or MLlib's) vector."""
    return type(kind).__name__ == "VectorUDT"


def is_image(kind: Any) -> bool:
    """Return whether a type is that of ``spark.read.format("image")``."""
    return isinstance(kind, T.StructType) and {"height", "width", "nChannels", "data"} <= set(kind.names)
