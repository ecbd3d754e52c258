"""A machine without Java: pip's is enough."""

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import choros.spark
spark = choros.spark.session("local[1]", spark_ui_enabled="false", spark_driver_bindAddress="127.0.0.1")
print("counted", spark.range(10).selectExpr("id * 2 AS twice").count())
spark.stop()
"""


def test_pips_java_is_enough(tmp_path):
    """Every program of this machine but java."""
    (tmp_path / "bin").mkdir()
    for folder in ("/bin", "/usr/bin"):
        for path in pathlib.Path(folder).iterdir():
            if not path.name.startswith("java") and not (tmp_path / "bin" / path.name).is_symlink():
                (tmp_path / "bin" / path.name).symlink_to(path)
    environ = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    environ |= {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "counted 10" in done.stdout, done.stderr
    assert (tmp_path / "cache/choros/java/bin/java").exists()
