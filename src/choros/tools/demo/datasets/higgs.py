"""Reader for the ATLAS Higgs Challenge 2014 (CERN Open Data record 328, doi:10.7483/OPENDATA.ATLAS.ZBP2.M5T8).

The file is a CSV, plain or gzip, of 818,238 simulated events. Of its 35 columns 30 are features. ``EventId``,
``Weight``, ``KaggleSet`` and ``KaggleWeight`` are not used. ``Label`` is s (signal) or b (background). The value -999.0
is a missing value.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import IO

import numpy as np

from choros.errors import InvalidDataError, counted
from choros.tools.demo.datasets.common import Dataset, divide

_NAMES = (
    "DER_mass_MMC DER_mass_transverse_met_lep DER_mass_vis DER_pt_h DER_deltaeta_jet_jet DER_mass_jet_jet "
    "DER_prodeta_jet_jet DER_deltar_tau_lep DER_pt_tot DER_sum_pt DER_pt_ratio_lep_tau DER_met_phi_centrality "
    "DER_lep_eta_centrality PRI_tau_pt PRI_tau_eta PRI_tau_phi PRI_lep_pt PRI_lep_eta PRI_lep_phi PRI_met "
    "PRI_met_phi PRI_met_sumet PRI_jet_num PRI_jet_leading_pt PRI_jet_leading_eta PRI_jet_leading_phi "
    "PRI_jet_subleading_pt PRI_jet_subleading_eta PRI_jet_subleading_phi PRI_jet_all_pt"
)
FEATURES = tuple(_NAMES.split())
LABELS = {"b": 0.0, "s": 1.0}
MISSING = -999.0
_LARGEST = float(np.finfo(np.float32).max)


def load_higgs(path: str | os.PathLike[str], seed: int = 0) -> Dataset:
    """Read the file. The features are standardized with the training part, so a missing value is 0, the mean.

    Args:
        path: The CSV, plain or gzip. The format is detected from the content.
        seed: Seed of the split; 70 % of each class are for training. Defaults to 0.

    Returns:
        The data, with 30 features and 2 classes; class 1 is signal.

    Raises:
        InvalidDataError: The file is missing, truncated, empty or not a CSV file; a column is missing; a value is not
            a number; or a label is neither s nor b. The message contains the row and column of an invalid value.
    """
    header, taken = _header(path)
    columns = [header.index(name) for name in (*FEATURES, "Label")]
    try:
        with _opened(path) as lines, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*input contained no data.*")
            table = np.loadtxt(
                islice(lines, taken, None),
                dtype=np.float32,
                delimiter=",",
                comments=None,
                quotechar='"',
                usecols=columns,
                converters={columns[-1]: _label},
                ndmin=2,
            )
    except (ValueError, KeyError) as error:
        if isinstance(error, InvalidDataError):
            raise
        _explain(path, header, columns)
        raise InvalidDataError(f"{path} cannot be read: {error}.") from error
    if not len(table):
        raise InvalidDataError(f"{path} has a header and no rows: give the whole file.")
    if not np.isfinite(table).all():
        _explain(path, header, columns)
    x, y = table[:, :-1], table[:, -1].astype(np.int32)
    if len(np.unique(y)) < 2:
        raise InvalidDataError(f"{path} holds events of one label only: give a file with both s and b.")
    x[x == np.float32(MISSING)] = np.nan
    return divide("higgs", x, y, 2, FEATURES, seed)


def _label(text: str) -> float:
    return LABELS[text.strip()]


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open the file as text, plain or gzip; convert errors of reading to InvalidDataError."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if zipped else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as lines:
            yield lines
    except FileNotFoundError as error:
        raise InvalidDataError(
            f"{path} does not exist: give the path of the CSV of CERN Open Data record 328."
        ) from error
    except IsADirectoryError as error:
        raise InvalidDataError(f"{path} is a folder: give the CSV in it.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidDataError(f"{path} is a truncated or damaged gzip file ({error}): fetch it again.") from error
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{path} is not text ({error.reason}): give the CSV, plain or gzip.") from error
    except PermissionError as error:
        raise InvalidDataError(f"{path} cannot be opened: {error.strerror}.") from error


def _header(path: str | os.PathLike[str]) -> tuple[list[str], int]:
    """Return the names of the columns, and the number of lines of the header."""
    with _opened(path) as lines:
        reader = csv.reader(lines)
        header = [name.strip() for name in next(reader, [])]
        taken = reader.line_num
    if not header:
        raise InvalidDataError(f"{path} is empty: give the CSV of CERN Open Data record 328.")
    missing = [name for name in (*FEATURES, "Label") if name not in header]
    if missing:
        raise InvalidDataError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {_some(missing)}; it has {len(header)}: "
            f"{_some(header)}. Give the CSV of CERN Open Data record 328, with its header."
        )
    return header, taken


def _some(names: list[str], most: int = 8) -> str:
    """Return a text with the first names, shortened, and the number of further names."""
    shown = ", ".join(name[:40] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _explain(path: str | os.PathLike[str], header: list[str], columns: list[int]) -> None:
    """Find the first invalid row and raise an error for it. This is slow, so it runs only for invalid files.

    Raises:
        InvalidDataError: A row is invalid. The message contains its number (1 after the header), line and column.
    """
    with _opened(path) as lines:
        reader = csv.reader(lines)
        next(reader)
        numbers = itemgetter(*columns[:-1])
        for number, row in enumerate((row for row in reader if row), start=1):
            where = f"{path}, row {number} (line {reader.line_num})"
            if len(row) <= max(columns):
                raise InvalidDataError(
                    f"{where} has {counted(len(row), 'column')} and the header {len(header)}: is the file truncated?"
                )
            column = None if _numbers(numbers(row)) else next(c for c in columns[:-1] if not _numbers([row[c]]))
            if column is not None:
                raise InvalidDataError(
                    f"{where}, column {header[column]}: {row[column][:40]!r} is not a number (missing values are "
                    "written -999.0)."
                )
            if row[columns[-1]].strip() not in LABELS:
                raise InvalidDataError(f"{where}, column Label: {row[columns[-1]][:40]!r} is neither s nor b.")


def _numbers(texts: Iterable[str]) -> bool:
    """Return whether all texts are finite numbers, also as float32."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return False
    return math.isfinite(sum(values)) and max(map(abs, values)) <= _LARGEST
