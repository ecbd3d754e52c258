"""The columns of features and labels, and a projection that converts them to arrays in the JVM.

Vectors (dense or sparse), arrays, scalars, images and bytes become columns whose Arrow memory numpy can use without a
copy. Columns are checked from the schema, so an error needs no Spark job.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from choros.errors import InvalidDataError, InvalidInputError
from choros.spark.task_slots import setting

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MARK = "choros_v"  # a boolean column: true for rows of validation
_WHOLE = {"byte": "int", "short": "int", "integer": "int", "int": "int", "long": "bigint", "bigint": "bigint"}
_REAL = {"float": "float32", "double": "float64"}
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class ColumnSpec:
    """One array of a model's inputs, targets or weights, and the columns from which it is made.

    Attributes:
        name: str. The column of the normalized frame.
        columns: tuple of str. The columns of the given frame.
        kind: "number", "list", "bytes" or "image": the form in Arrow.
        shape: tuple or None. The shape to which a row is reshaped; None keeps the shape.
        classes: int or None. Number of classes, for labels that are class indices.
        ignored: int or None. A label that is not a class and that the loss ignores.
    """

    name: str
    columns: tuple[str, ...]
    kind: str
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    ignored: int | None = None

    @property
    def description(self) -> str:
        """The columns as text for messages."""
        return f"the column {self.columns[0]!r}" if len(self.columns) == 1 else f"the columns {list(self.columns)}"


@dataclass(frozen=True)
class Columns:
    """The meaning of the columns of a normalized frame.

    Attributes:
        leaves: dict from name to ColumnSpec, in the order of the frame's columns.
        x, y, weight: names of columns, nested like the model's inputs and outputs; ``y`` and ``weight`` may be None.
        marked: bool. Whether the frame has the column ``MARK``. Defaults to False.
    """

    leaves: dict[str, ColumnSpec]
    x: Any
    y: Any = None
    weight: Any = None
    marked: bool = False


@dataclass
class _Maker:
    frame: DataFrame
    floatx: str
    leaves: dict[str, ColumnSpec] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)

    def nested(self, selection: Any, letter: str, shapes: Sequence[tuple[str, Shape]] | None, role: str) -> Any:
        """Create the arrays of ``selection``, and return their names, nested in the same way."""
        if isinstance(selection, Mapping):
            by_name = dict(shapes or ())
            if by_name and set(by_name) != set(selection) and len(by_name) == len(selection):
                raise InvalidDataError(
                    f"{role} names {sorted(selection)}, but the model has {sorted(by_name)}: give these names."
                )
            return {name: self.leaf(item, letter, by_name.get(name), role) for name, item in selection.items()}
        several = isinstance(selection, Sequence) and not isinstance(selection, str)
        if shapes is not None and len(shapes) > 1:
            if not several or len(selection) != len(shapes):
                raise InvalidDataError(
                    f"{role}={selection!r}, but the model has {len(shapes)} of them ({[name for name, _ in shapes]}): "
                    "give a list with one for each, or a dict from these names to columns."
                )
            return [self.leaf(item, letter, shape, role) for item, (_, shape) in zip(selection, shapes, strict=True)]
        return self.leaf(selection, letter, shapes[0][1] if shapes else None, role)

    def leaf(self, selection: Any, letter: str, shape: Shape | None, role: str) -> str:
        """Create one array from one or several columns; return its name."""
        names = (
            (selection,) if isinstance(selection, str) else tuple(selection) if isinstance(selection, Sequence) else ()
        )
        if not names or not all(isinstance(name, str) and name for name in names):
            raise InvalidDataError(f"{role}={selection!r}: give a column's name, a list of names, or a dict of these.")
        columns = tuple(self.find(name, role) for name in names)
        name = f"choros_{letter}{len(self.leaves)}"
        if len(columns) == 1:
            kind, made = self.one(columns[0], role)
        else:
            kind, made = "list", self.together(columns, role)
        fixed = tuple(int(size) for size in shape if size) if shape is not None and all(shape) else None
        self.leaves[name] = ColumnSpec(name, columns, kind, fixed)
        self.made.append(made.alias(name))
        return name

    def find(self, name: str, role: str) -> str:
        """Return the name of a column as the frame spells it."""
        names, same = self.frame.columns, letters(self.frame)
        twice = [other for other in names if same(other) == same(name)]
        if len(twice) > 1:
            raise InvalidDataError(
                f"{role}: the frame has {len(twice)} columns that Spark takes for {name!r} ({', '.join(twice)}): "
                "rename all but one (toDF), or drop them."
            )
        if name in names:
            return name
        alike = [other for other in names if other.lower() == name.lower()]
        if len(alike) == 1:
            return str(alike[0])
        similar = difflib.get_close_matches(name, names, n=1)
        hint = f": did you mean {similar[0]!r}?" if similar else "."
        raise InvalidDataError(f"{role}: the frame has no column {name!r}{hint} It has {', '.join(names)}.")

    def one(self, name: str, role: str) -> tuple[str, Any]:
        """Return the form of a column in Arrow, and the expression for it."""
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
            wanted = "array<" * depth + self.number(inside, name, role) + ">" * depth
            return "list", column if kind.simpleString() == wanted else column.cast(wanted)
        return "number", column.cast(self.number(kind, name, role))

    def together(self, columns: tuple[str, ...], role: str) -> Column:
        """Return an expression that concatenates several columns of numbers, vectors and arrays."""
        kinds = {name: self.frame.schema[name].dataType for name in columns}
        inside = {n: k.elementType if isinstance(k, T.ArrayType) else k for n, k in kinds.items()}
        real = "double" if self.floatx == "float64" else "float"
        types_found = {real if is_vector(kind) else self.number(kind, name, role) for name, kind in inside.items()}
        wanted = types_found.pop() if len(types_found) == 1 else "bigint" if types_found == {"int", "bigint"} else real
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

    def vector(self, column: Column) -> Column:
        """Return an expression that converts a sparse or dense vector to an array; null stays null."""
        from pyspark.ml.functions import vector_to_array

        dtype = "float64" if self.floatx == "float64" else "float32"
        return F.when(column.isNotNull(), vector_to_array(column, dtype))

    def number(self, kind: Any, name: str, role: str) -> str:
        """Return the Spark type to which numbers of a type are cast. Integers stay integers."""
        type_name = kind.typeName()
        if type_name in _WHOLE:
            return _WHOLE[type_name]
        if type_name in ("float", "double", "decimal", "boolean"):
            return "double" if self.floatx == "float64" else "float"
        if type_name == "string":
            raise InvalidDataError(
                f"{role}: the column {name!r} holds text, which a model cannot take: make numbers of it with "
                "StringIndexer (classes) or cast('float')."
            )
        raise InvalidDataError(
            f"{role}: the column {name!r} is of type {kind.simpleString()}: give numbers, vectors, arrays of numbers, "
            "bytes or Spark's images."
        )


def normalise(
    frame: DataFrame,
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
    """Return a frame of arrays, numbers and bytes, and the meaning of its columns.

    Args:
        frame: DataFrame of classic Spark or Spark Connect.
        features: the name of a column. Or a list of names, one for each input of a model with several inputs; for one
            input the columns are concatenated. Or a dict from the model's inputs to these.
        label: the same for the outputs; None for no targets.
        weight: the name of a column of sample weights, or a list or dict of names like the outputs; or None.
        validation: the fraction of rows for validation, drawn with ``seed``. Or the name of a boolean column that is
            true for these rows. Or None.
        inputs: the name of each input of the model and the shape of a row, with None for a free size. Rows with the
            right number of values are reshaped to it.
        outputs: the same for the outputs.
        seed: int. Defaults to 0.
        floatx: dtype of floats, "float32" or "float64". Defaults to "float32".
        nulls: "error" to raise an error at the first row with a null; "drop" to drop such rows. Defaults to "error".
        keep: bool. Whether to keep the columns of the given frame, before the new ones. Defaults to False.

    Raises:
        InvalidInputError: the frame is not a DataFrame of Spark.
        InvalidDataError: a column is missing, ambiguous, or has an unsupported type. No job was started.

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


def _holed(column: Column, kind: Any) -> Column:
    """Return an expression that is true if an array contains a null; None if its type excludes nulls."""
    if not isinstance(kind, T.ArrayType):
        return None
    deeper = isinstance(kind.elementType, T.ArrayType)
    if not (kind.containsNull or deeper):
        return None

    def hole(one: Column) -> Column:
        inside = _holed(one, kind.elementType)
        return one.isNull() if inside is None else one.isNull() | inside

    return F.exists(column, hole)


def _mark(maker: _Maker, validation: float | str | None, seed: int) -> Column:
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


def check_frame(frame: DataFrame) -> None:
    """Refuse an object that is not a DataFrame of Spark, such as a DataFrame of pandas.

    Raises:
        InvalidInputError: the object is not a DataFrame of Spark. The message contains a remedy.
    """
    if not all(hasattr(frame, method) for method in ("sparkSession", "mapInArrow")):
        kind = f"{type(frame).__module__.partition('.')[0]}.{type(frame).__name__}"
        raise InvalidInputError(
            f"The rows are a {kind}, not a DataFrame of Spark: make one, session.createDataFrame(frame), or train "
            "arrays by choros.Trainer(model, launcher=choros.Spark())."
        )


def letters(frame: DataFrame) -> Callable[[str], str]:
    """Return a function that maps equal column names to one text: with or without case, as the session is set."""
    minds = setting(frame.sparkSession, "spark.sql.caseSensitive", "false").lower() == "true"
    return str if minds else str.lower


def is_map(value: object) -> bool:
    """Return whether an object is a mapping."""
    return isinstance(value, Mapping)


def quoted(name: str) -> str:
    """Return the quoted name of a column, so that Spark parses any characters in it.

    Example:
        >>> quoted("a.b")
        '`a.b`'
    """
    return "`" + name.replace("`", "``") + "`"


def is_vector(kind: object) -> bool:
    """Return whether a type is a vector of Spark ML or MLlib."""
    return type(kind).__name__ == "VectorUDT"


def is_image(kind: T.DataType) -> bool:
    """Return whether a type is that of ``spark.read.format("image")``."""
    return isinstance(kind, T.StructType) and {"height", "width", "nChannels", "data"} <= set(kind.names)
