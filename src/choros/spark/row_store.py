"""The rows of a task as memory-mapped arrays on a local disk. They are written once and deleted with the process.

While the page cache has space, access is as fast as memory. The rows may also be larger than the memory. The files have
no name, so a killed task leaves no files.
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
    """One array that grows, in an anonymous temporary file.

    Args:
        description: str. Its description in error messages.
        folder: str. The directory of the file.

    Example:
        >>> rows = Rows("the column 'x'", tempfile.gettempdir())
        >>> rows.append(np.ones((2, 3), "float32"))
        >>> rows.append(np.zeros((1, 3), "float32"))
        >>> rows.array().shape
        (3, 3)
        >>> rows.close()
    """

    def __init__(self, description: str, folder: str) -> None:
        self.description, self.folder, self.count = description, folder, 0
        self.form: Form | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()

    def append(self, rows: Array) -> None:
        """Append rows.

        Raises:
            InvalidDataError: the rows have another shape or dtype, or the disk is full.
        """
        form = rows.dtype.name, tuple(rows.shape[1:])
        if not len(rows):
            return
        if self.form is None:
            self.form = form
        elif form != self.form:
            raise InvalidDataError(
                f"Rows of {self.description} have the shapes {self.form[1]} and {form[1]}: a batch needs rows of "
                "one shape."
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
        """Return all rows as a read-only mapping.

        Args:
            form: dtype and row shape from other tasks, for an array without rows.
        """
        dtype, shape = self.form or form or ("float32", ())
        # An empty file cannot be mapped.
        if not self.count:
            return np.empty((0, *shape), dtype)
        self._file.flush()
        number = self._file.fileno()
        path = f"/proc/{os.getpid()}/fd/{number}"
        place: Any = path if os.path.exists(path) else self._file
        return np.memmap(place, dtype, "r", 0, (self.count, *shape))

    def close(self) -> None:
        """Close the file. Arrays that are in use stay valid."""
        self._file.close()


@dataclass(frozen=True)
class Data:
    """The rows of one task, nested like the model's inputs and outputs.

    Attributes:
        x, y, weight: arrays of shape (rows, ...), mapped and read-only; ``y`` and ``weight`` may be None.
        rows: int. Number of rows.
    """

    x: Any
    y: Any
    weight: Any
    rows: int


class RowStore:
    """The files with the rows of a task.

    Args:
        columns: the meaning of the columns of a batch.
        folder: str. A local directory; see ``local_folder``.
    """

    def __init__(self, columns: Columns, folder: str) -> None:
        self.columns = columns
        parts = (False, True) if columns.marked else (False,)
        self._files_of = {
            (name, part): Rows(leaf.description, folder) for name, leaf in columns.leaves.items() for part in parts
        }

    def fill(self, batches: Iterable[Any]) -> None:
        """Write all batches.

        Args:
            batches: iterable of pyarrow.RecordBatch, of a frame of ``normalise``.

        Raises:
            InvalidDataError: there are nulls or rows of different lengths, or the disk is full.
        """
        from choros.spark.pyarrow import to_array

        for batch in batches:
            mark = np.asarray(batch.column(MARK).to_numpy(zero_copy_only=False), bool) if self.columns.marked else None
            for name, leaf in self.columns.leaves.items():
                rows = to_array(batch.column(name), leaf)
                if mark is None:
                    self._files_of[name, False].append(rows)
                else:
                    self._files_of[name, False].append(rows[~mark])
                    self._files_of[name, True].append(rows[mark])

    def forms(self) -> dict[str, Form]:
        """Return the dtype and row shape of each array that has rows."""
        return {name: rows.form for (name, _), rows in self._files_of.items() if rows.form is not None}

    def data(self, forms: dict[str, Form], validation: bool = False) -> Data:
        """Return the rows.

        Args:
            forms: dtype and row shape of each array over all tasks, for arrays without rows.
            validation: True for the rows of validation. Defaults to False.
        """

        def nested(names: Any) -> Any:
            if names is None:
                return None
            if isinstance(names, dict):
                return {key: nested(name) for key, name in names.items()}
            if isinstance(names, list):
                return [nested(name) for name in names]
            return self._files_of[names, validation].array(forms.get(names))

        c = self.columns
        rows = self._files_of[next(iter(c.leaves)), validation].count
        return Data(nested(c.x), nested(c.y), nested(c.weight), rows)

    def close(self) -> None:
        """Close the files."""
        for rows in self._files_of.values():
            rows.close()


def agree(columns: Columns, description: list[dict[str, Form]]) -> dict[str, Form]:
    """Return the dtype and row shape of each array, which must be equal in all tasks.

    Args:
        columns: the meaning of the names.
        description: for each task, the forms of its arrays.

    Raises:
        InvalidDataError: tasks have different forms of an array.

    Example:
        >>> from choros.spark.feature_columns import ColumnSpec
        >>> leaf = ColumnSpec("x", ("x",), "list")
        >>> agree(Columns({"x": leaf}, "x"), [{}, {"x": ("float32", (3,))}])
        {'x': ('float32', (3,))}
    """
    stored_forms: dict[str, Form] = {}
    for forms in description:
        for name, (dtype, shape) in forms.items():
            form = (dtype, tuple(shape))
            if stored_forms.setdefault(name, form) != form:
                raise InvalidDataError(
                    f"Rows of {columns.leaves[name].description} have the shapes {stored_forms[name][1]} and "
                    f"{form[1]}: a batch needs rows of one shape."
                )
    return stored_forms


def local_folder(number: int) -> str:
    """Return a directory for a task's files: one of Spark's local directories, else that of temporary files.

    Args:
        number: int. Index of the task, so that tasks use different disks.

    Example:
        >>> os.path.isdir(local_folder(0))
        True
    """
    folders = [
        folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder and os.access(folder, os.W_OK)
    ]
    return folders[number % len(folders)] if folders else tempfile.gettempdir()
