"""Pack this environment into one file for the executors: ``choros spark pack``.

Spark brings the file to them (``spark.archives``).

By ``venv-pack`` (of ``choros[spark]``) for a venv, by ``conda-pack`` for conda's. A venv has no Python of its own: the
executors need the same one at the same place, or ``--python-prefix``. Conda's has all.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from choros.errors import InvalidInputError, MissingPackageError, brief

UNPACKED = "environment"  # the directory in which executors unpack the file


def pack(
    output: str = "environment.tar.gz",
    prefix: str = sys.prefix,
    *,
    python_prefix: str = "",
    level: int = 1,
    force: bool = False,
) -> str:
    """Pack an environment.

    Args:
        output: str. The file: .tar.gz, .tgz or .zip. Defaults to "environment.tar.gz".
        prefix: str. The directory of the environment. Defaults to that of this process.
        python_prefix: str. The prefix on the executors of the Python from which a venv was created, such as "/usr".
            Defaults to the same as here.
        level: int. The compression level, 0 to 9. Level 1 takes a tenth of the time of 9, and the file is only a little
            larger. Defaults to 1.
        force: bool. Replace an existing file. Defaults to False.

    Returns:
        The file.

    Raises:
        InvalidInputError: there is no environment, the file exists or its folder does not, or the packing failed, for
            example because of packages in editable mode.
        MissingPackageError: the packing library is missing.
        OSError: the file cannot be written.
    """
    if not output.endswith((".tar.gz", ".tgz", ".zip")):
        raise InvalidInputError(f"{output}: Spark unpacks .tar.gz, .tgz and .zip.")
    folder = Path(output).absolute().parent
    if not folder.is_dir():
        raise InvalidInputError(f"{output} cannot be written: {folder} is not a directory; create it first.")
    if Path(output).exists() and not (force and Path(output).is_file()):
        remedy = "give another name, or --force to replace it" if Path(output).is_file() else "give another name"
        raise InvalidInputError(f"{output} exists: {remedy}.")
    conda = (Path(prefix) / "conda-meta").is_dir()
    if not conda and not (Path(prefix) / "pyvenv.cfg").exists():
        raise InvalidInputError(
            f"{prefix} is neither a venv nor conda's: make one (python -m venv DIR), and install choros there."
        )
    name, module = ("conda-pack", "conda_pack") if conda else ("venv-pack2", "venv_pack")
    if importlib.util.find_spec(module) is None:
        raise MissingPackageError(f"{prefix} is packed by {name}: pip install {name}.")
    how: dict[str, Any] = {"prefix": prefix, "output": output, "force": force, "compress_level": level}
    if conda:
        from conda_pack import pack as call
    else:
        from venv_pack import pack as call

        how |= {"python_prefix": python_prefix} if python_prefix else {}
    try:
        with warnings.catch_warnings():
            # A file of two packages is packed twice, which zipfile warns of.
            warnings.filterwarnings("ignore", "Duplicate name", UserWarning)
            return str(call(**how))
    except OSError:  # of the file that is written
        raise
    except Exception as error:  # the two libraries raise different types
        raise InvalidInputError(
            f"{name} cannot pack {prefix}: {brief(error)}. Editable installs are not packed: install it "
            "as a wheel (pip install .)."
        ) from error


def usage(file: str) -> str:
    """Return the size of a packed environment, and the three ways to use it."""
    return (
        f"{file}: {os.path.getsize(file) / 2**20:.0f} MB\n"
        f"choros submit --on spark --archive {file} train.py\n"
        f"spark-submit --archives {file}#{UNPACKED} --conf spark.pyspark.python=./{UNPACKED}/bin/python train.py\n"
        f"choros.spark.session('spark://head:7077', archive={file!r})"
    )
