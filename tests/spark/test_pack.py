"""An environment is packed, travels, and a task runs in it."""

import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

from choros.cli import main
from choros.errors import InvalidInputError
from choros.spark.pack_environment import pack

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import os, sys
import choros.spark, choros.spark.doctor
spark = choros.spark.session(sys.argv[1], archive=sys.argv[2], spark_ui_enabled="false", spark_driver_host="127.0.0.1",
                             spark_cores_max="1", spark_executor_memory="512m")
facts = choros.spark.doctor.examine(spark)
from choros.spark.barrier import run
from choros.spark.feature_columns import normalise
frame, columns = normalise(spark.range(3), "id")
(found,) = run(frame, lambda task: (sys.prefix + "|" + __import__("numpy").__file__).encode(), 1, columns=columns)
print("prefix", found.decode())
spark.stop()
"""


def test_a_task_runs_in_the_packed_environment(cluster, tmp_path, capsys):
    pytest.importorskip("venv_pack", reason="it is packed by venv-pack2: pip install 'choros[spark]'")
    made = tmp_path / "made"
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    for folder in reversed([ROOT / "src", *map(pathlib.Path, sys.path)]):  # links: the archive is small, all is found
        if folder.name in ("src", "site-packages"):
            for entry in folder.iterdir():
                link = packages / entry.name
                if entry.suffix != ".pth" and not link.exists():
                    link.symlink_to(entry)
    file = tmp_path / "packed.tar.gz"
    assert main(["spark", "pack", str(file), "--prefix", str(made)]) == 0
    assert f"--archives {file}#environment" in capsys.readouterr().out
    environ = {**os.environ, **cluster.environment}
    environ = {name: value for name, value in environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONPATH")}
    (tmp_path / "there.py").write_text(SCRIPT)
    command = [str(made / "bin/python"), str(tmp_path / "there.py"), cluster.url, str(file)]
    with cluster.another_worker(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    prefix, _, numpy = done.stdout.partition("prefix ")[2].strip().partition("|")
    assert prefix.startswith(str(tmp_path / "work"))
    assert prefix.endswith("/environment")
    assert numpy.startswith(prefix)


def test_a_file_is_replaced_only_if_asked(tmp_path, capsys, recwarn):
    pytest.importorskip("venv_pack", reason="it is packed by venv-pack2: pip install 'choros[spark]'")
    made, file = tmp_path / "made", tmp_path / "packed.zip"
    venv.create(made, symlinks=True)
    file.write_text("mine")
    command = ["spark", "pack", str(file), "--prefix", str(made)]
    assert main(command) == 2
    assert f"{file} exists: give another name, or --force to replace it" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert zipfile.is_zipfile(file)
    assert [str(warning.message) for warning in recwarn] == []
    missing = tmp_path / "none" / "packed.zip"
    assert main(["spark", "pack", str(missing), "--prefix", str(made)]) == 2
    assert f"{missing} cannot be written: {missing.parent} is not a directory" in capsys.readouterr().err


def test_what_cannot_be_packed_is_told(tmp_path, capsys):
    with pytest.raises(InvalidInputError, match="Spark unpacks"):
        pack("environment.7z")
    assert main(["spark", "pack", str(tmp_path / "a.zip"), "--prefix", str(tmp_path)]) == 2
    assert "neither a venv nor conda's" in capsys.readouterr().err
