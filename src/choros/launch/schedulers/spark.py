"""Spark: ``spark-submit`` with the user's script as the driver; its ``Trainer`` has ``launcher="spark"``.

The script's process is the driver and runs on the submitting host, so progress and logs appear there. With Spark
Connect the script is a client, and is run directly without ``spark-submit``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from choros.errors import InvalidInputError
from choros.launch.schedulers.job import Job
from choros.launch.schedulers.scheduler import Scheduler

# launcher="spark", choros.Spark(...), the estimator, or a trainer of dist-keras
_SPARK_NAMES = re.compile(r"[\"']spark[\"']|\bSpark\(|\bchoros\.spark\b|\bdistkeras\b|\bKeras(Estimator|Model)\b")
_UNPACKED = "environment"  # the executors' directory of the unpacked environment


def script(job: Job) -> str:
    r"""Return the script of a job.

    Example:
        >>> print(script(Job(("python", "a.py", "--fast"), "a", nodes=2, cores=4, master="yarn")).splitlines()[1])
        exec spark-submit --master yarn --name a \
        >>> print(script(Job(("python", "a.py"), "a", master="sc://head")).splitlines()[-1])
        SPARK_REMOTE=sc://head exec python a.py

    Raises:
        InvalidInputError: the command is not a Python script.
    """
    _check(job)
    lines = ["#!/bin/bash", *([f"# Written by: {job.written_by}"] if job.written_by else []), *job.setup]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env]
    if job.master.startswith("sc://"):
        lines += [f"SPARK_REMOTE={shlex.quote(job.master)} exec {shlex.join(job.command)}"]
        return "\n".join(lines) + "\n"
    first = ["exec", "spark-submit", *(["--master", job.master] if job.master else []), "--name", job.name]
    first += ["--queue", job.queue] if job.queue else []
    command = [shlex.join(first), *(f"--conf {shlex.quote(setting)}" for setting in _settings(job))]
    if job.archive:
        command.append(shlex.join(["--archives", f"{job.archive}#{_UNPACKED}"]))
    command += [*job.directives, shlex.join(job.command[1:])]
    return "\n".join([*lines, " \\\n    ".join(command)]) + "\n"


def _settings(job: Job) -> list[str]:
    cores, size = job.ranks_per_node * job.cores, job.size
    settings = [
        "spark.dynamicAllocation.enabled=false",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval=1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures=30",
        f"spark.executor.cores={cores}",
        f"spark.task.cpus={job.cores}",
    ]
    if job.master.startswith("spark://") or not job.master:
        settings.append(f"spark.cores.max={size * job.cores}")
    if not job.master.startswith(("spark://", "local")):
        settings.append(f"spark.executor.instances={job.nodes}")
    if job.gpus:
        settings.append(f"spark.executor.resource.gpu.amount={job.ranks_per_node * job.gpus}")
        settings.append(f"spark.task.resource.gpu.amount={job.gpus}")
    python = job.command[0]
    if job.archive:
        settings += [f"spark.pyspark.python=./{_UNPACKED}/bin/python", f"spark.pyspark.driver.python={python}"]
    else:
        settings.append(f"spark.pyspark.python={python}")
    return settings + [f"spark.executorEnv.{name}={value}" for name, value in job.env]


def _check(job: Job) -> None:
    command = job.command
    if len(command) < 2 or not command[1].endswith((".py", ".pyz")):
        raise InvalidInputError(f"Spark runs Python scripts: give a file that ends in .py, not {shlex.join(command)}")


def names_spark(script: str, arguments: Sequence[str] = ()) -> bool:
    """Return whether a script's text, or an argument of it, has a name by which Choros trains on Spark.

    It is a search in the text, so a name in another file of the program is not found.

    Args:
        script: the text of the script.
        arguments: those of the script.

    Example:
        >>> names_spark('choros.Trainer(model, launcher="spark")'), names_spark("choros.Trainer(model, workers=4)")
        (True, False)
    """
    return bool(_SPARK_NAMES.search(script)) or any("spark" in argument.lower() for argument in arguments)


def _attached(*_: object) -> list[str]:
    raise InvalidInputError("a job of Spark runs where it was submitted, and its output is there; end it by Ctrl-C")


SPARK = Scheduler(
    name="spark",
    program="spark-submit",
    script=script,
    submit=lambda file: ["bash", file],
    job_id=str,
    status=_attached,
    cancel=_attached,
    logs=_attached,
    ending=".spark.sh",
    attached=True,
    named_only=True,
)
