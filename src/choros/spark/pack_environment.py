"""Pack this environment into one file for the executors: ``python -m choros.spark.pack_environment``.

Spark brings the file to them (``spark.archives``).

By ``venv-pack`` (of ``choros[spark]``) for a venv, by ``conda-pack`` for conda's. A venv has no Python of its own: the
executors need the same one at the same place, or ``--python-prefix``. Conda's has all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from choros.console import write_line
from choros.errors import InvalidInputError, brief

UNPACKED = "environment"  # the directory in which executors unpack the file


def pack(
    output: str = "environment.tar.gz", prefix: str = sys.prefix, *, python_prefix: str = "", level: int = 1
) -> str:
    """Pack an environment; an existing file is replaced.

    Args:
        output: str. The file: .tar.gz, .tgz or .zip. Defaults to "environment.tar.gz".
        prefix: str. The directory of the environment. Defaults to that of this process.
        python_prefix: str. The prefix on the executors of the Python from which a venv was created, such as "/usr".
            Defaults to the same as here.
        level: int. The compression level, 0 to 9. Level 1 takes a tenth of the time of 9, and the file is only a little
            larger. Defaults to 1.

    Returns:
        The file.

    Raises:
        InvalidInputError: there is no environment, the packing library is missing, or it failed, for example because of
            packages in editable mode.
    """
    if not output.endswith((".tar.gz", ".tgz", ".zip")):
        raise InvalidInputError(f"{output}: Spark unpacks .tar.gz, .tgz and .zip.")
    conda = (Path(prefix) / "conda-meta").is_dir()
    if not conda and not (Path(prefix) / "pyvenv.cfg").exists():
        raise InvalidInputError(
            f"{prefix} is neither a venv nor conda's: make one (python -m venv DIR), and install choros there."
        )
    name, module = ("conda-pack", "conda_pack") if conda else ("venv-pack2", "venv_pack")
    if importlib.util.find_spec(module) is None:
        raise InvalidInputError(f"{prefix} is packed by {name}: pip install {name}.")
    how: dict[str, Any] = {"prefix": prefix, "output": output, "force": True, "compress_level": level}
    if conda:
        from conda_pack import pack as call
    else:
        from venv_pack import pack as call

        how |= {"python_prefix": python_prefix} if python_prefix else {}
    try:
        return str(call(**how))
    except Exception as error:  # the two libraries raise different types
        raise InvalidInputError(
            f"{name} cannot pack {prefix}: {brief(error)}. Editable installs are not packed: install it "
            "as a wheel (pip install .)."
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Pack an environment, and print how to use the file.

    Args:
        argv: the arguments. Defaults to those of this process.

    Returns:
        0; 2 if the environment cannot be packed.
    """
    parser = argparse.ArgumentParser(prog="python -m choros.spark.pack_environment", description=__doc__)
    parser.add_argument("output", nargs="?", default="environment.tar.gz", help="default: environment.tar.gz")
    parser.add_argument("--prefix", default=sys.prefix, help="the environment (default: this Python's)")
    parser.add_argument("--python-prefix", default="", help="where executors have the venv's Python, such as /usr")
    parser.add_argument("--level", type=int, default=1, help="how hard to compress, 0 to 9 (default: 1)")
    args = parser.parse_args(argv)
    try:
        file = pack(args.output, args.prefix, python_prefix=args.python_prefix, level=args.level)
    except InvalidInputError as error:
        write_line(f"choros.spark.pack_environment: {error}", sys.stderr)
        return 2
    write_line(
        f"{file}: {os.path.getsize(file) / 2**20:.0f} MB\n"
        f"choros submit --on spark --archive {file} train.py\n"
        f"spark-submit --archives {file}#{UNPACKED} --conf spark.pyspark.python=./{UNPACKED}/bin/python train.py\n"
        f"choros.spark.session('spark://head:7077', archive={file!r})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
