"""A task's rows as arrays on its own disk: written once as they come, mapped, and gone with the process.

As fast as memory while the system's cache has room, and larger than memory where it has not. The files have no name, so
a task that is killed leaves nothing behind.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from choros.errors import InvalidDataError
from choros.spark.feature_columns import MARK, Columns
from choros.types import Array

Form = tuple[str, tuple[int, ...]]  # dtype, shape of a row


class Rows:
    """One array that grows: a file without a name.

    Args:
        said: str. What it is, for errors.
        folder: str. Where the file is made, readable by its owner alone.

    Example:
        >>> rows = Rows("the column 'x'", tempfile.gettempdir())
        >>> rows.append(np.ones((2, 3), "float32"))
        >>> rows.append(np.zeros((1, 3), "float32"))
        >>> rows.array().shape
        (3, 3)
        >>> rows.close()
    """

    def __init__(self, said: str, folder: str) -> None:
        self.said, self.folder, self.count = said, folder, 0
        self.form: Form | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()

    def append(self, rows: Array) -> None:
        """Write rows after those that are there.

        Raises:
            InvalidDataError: they are of another shape, or the disk is full.
        """
        form = rows.dtype.name, tuple(rows.shape[1:])
        if not len(rows):
            return
        if self.form is None:
            self.form = form
        elif form != self.form:
            raise InvalidDataError(
                f"Rows of {self.said} have the shapes {self.form[1]} and {form[1]}: a batch needs rows of one shape."
            )
        try:
            self._file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise InvalidDataError(
                f"The rows cannot be kept in {self.folder} ({error.strerror}): give Spark a disk with room "
                "(spark.local.dir), or train with fewer rows."
            ) from error
        self.count += len(rows)

    def array(self, form: Form | None = None) -> Array:
        """Return all rows, mapped and read-only.

        Args:
            form: dtype and shape of a row where there is none here, as other tasks have seen it.
        """
        dtype, shape = self.form or form or ("float32", ())
        if not self.count:
            return np.empty((0, *shape), dtype)
        self._file.flush()
        number = self._file.fileno()
        path = f"/proc/{os.getpid()}/fd/{number}"
        place: Any = path if os.path.exists(path) else self._file
        return np.memmap(place, dtype, "r", 0, (self.count, *shape))

    def close(self) -> None:
        """Let the file go; arrays that are in use stay as they are."""
        self._file.close()


@dataclass(frozen=True)
class Data:
    """One task's rows, nested as the model takes them.

    Attributes:
        x, y, weight: arrays of shape (rows, ...), mapped and read-only; ``y`` and ``weight`` may be None.
        rows: int.
    """

    x: Any
    y: Any
    weight: Any
    rows: int


class RowStore:
    """The files into which a task's batches are written.

    Args:
        columns: what the columns of a batch mean.
        folder: str. Of the task's own; see ``local_folder``.
    """

    def __init__(self, columns: Columns, folder: str) -> None:
        self.columns = columns
        parts = (False, True) if columns.marked else (False,)
        self._kept = {(name, part): Rows(leaf.said, folder) for name, leaf in columns.leaves.items() for part in parts}

    def fill(self, batches: Iterable[Any]) -> None:
        """Write all batches.

        Args:
            batches: pyarrow.RecordBatch, of a frame that ``normalise`` made.

        Raises:
            InvalidDataError: nulls, rows of different lengths, a full disk.
        """
        from choros.spark.pyarrow import to_array

        for batch in batches:
            mark = np.asarray(batch.column(MARK).to_numpy(zero_copy_only=False), bool) if self.columns.marked else None
            for name, leaf in self.columns.leaves.items():
                rows = to_array(batch.column(name), leaf)
                if mark is None:
                    self._kept[name, False].append(rows)
                else:
                    self._kept[name, False].append(rows[~mark])
                    self._kept[name, True].append(rows[mark])

    def forms(self) -> dict[str, Form]:
        """Return the form of each array that has a row here."""
        return {name: rows.form for (name, _), rows in self._kept.items() if rows.form is not None}

    def data(self, forms: dict[str, Form], validation: bool = False) -> Data:
        """Return the rows.

        Args:
            forms: of all tasks.
            validation: those that validate.
        """

        def nested(names: Any) -> Any:
            if names is None:
                return None
            if isinstance(names, dict):
                return {key: nested(name) for key, name in names.items()}
            if isinstance(names, list):
                return [nested(name) for name in names]
            return self._kept[names, validation].array(forms.get(names))

        c = self.columns
        rows = self._kept[next(iter(c.leaves)), validation].count
        return Data(nested(c.x), nested(c.y), nested(c.weight), rows)

    def close(self) -> None:
        """Let the files go."""
        for rows in self._kept.values():
            rows.close()


def agree(columns: Columns, said: list[dict[str, Form]]) -> dict[str, Form]:
    """Return the form of each array, which is one for all tasks.

    Args:
        columns: what the names mean.
        said: by each task, the forms that it has seen.

    Raises:
        InvalidDataError: tasks have seen different ones.

    Example:
        >>> from choros.spark.feature_columns import ColumnSpec
        >>> leaf = ColumnSpec("x", ("x",), "list")
        >>> agree(Columns({"x": leaf}, "x"), [{}, {"x": ("float32", (3,))}])
        {'x': ('float32', (3,))}
    """
    found: dict[str, Form] = {}
    for forms in said:
        for name, (dtype, shape) in forms.items():
            form = (dtype, tuple(shape))
            if found.setdefault(name, form) != form:
                raise InvalidDataError(
                    f"Rows of {columns.leaves[name].said} have the shapes {found[name][1]} and {form[1]}: a batch "
                    "needs rows of one shape."
                )
    return found


def local_folder(number: int) -> str:
    """Return a folder for a task's files: one of Spark's own local ones, else that of temporary files.

    Args:
        number: int. The task's, so that several tasks use several disks.

    Example:
        >>> os.path.isdir(local_folder(0))
        True
    """
    folders = [one for one in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if one and os.access(one, os.W_OK)]
    return folders[number % len(folders)] if folders else tempfile.gettempdir()
