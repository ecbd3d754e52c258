"""``choros submit --on slurm --nodes 2 ... train.py ARGS``: submit a job to a scheduler. Imports no framework."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choros.backend_choice import announce
from choros.cli.arguments import Known, choose_scheduler, count, whole
from choros.cli.command_target import check_script, command_of, is_script
from choros.cli.parser import Parser
from choros.errors import InvalidInputError, MissingPackageError
from choros.launch.retired import cobalt
from choros.launch.schedulers import (
    SCHEDULERS,
    Job,
    JobOptions,
    Scheduler,
    complete,
    config_file,
    job_of,
    name_of,
    presets,
    require_program,
    site_names,
    submit_job,
    transport_warning,
    write_script,
)
from choros.launch.schedulers.job import MOST
from choros.launch.schedulers.mpiexec import KNOWN as MPIS
from choros.launch.schedulers.slurm import SRUN_MPI, srun_mpi_warning
from choros.launch.schedulers.spark import names_spark
from choros.launch.schedulers.yarn import active_nodes
from choros.spark.java import ensure_java

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Writes the script of a job into NAME.SCHEDULER.sh here, submits it and prints the job's id; --dry-run prints the script
and does nothing else. Ranks have their threads set before anything is imported. A script that has the callback
choros.callbacks.BeforeTimeLimit saves its state before the time limit, and the job is requeued and resumes.
"""
_EPILOG = """\
examples:
  choros submit --on slurm --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 train.py --epochs 3
  choros submit --site polaris --account MyProject --filesystems home:eagle --dry-run train.py
  choros submit --on k8s --image registry.example.org/train:1 --nodes 2 train.py
  choros submit --on spark --master yarn --nodes auto train.py

~/.config/choros/config.toml (or XDG_CONFIG_HOME) has defaults for options that are not given:
  [defaults]
  site = "mine"                        a preset, or a file of choros site init
  account = "MyProject"
  setup = ["module load python"]
choros status, log and cancel take the scheduler of its site, or its on, too.

Exit codes: 0 submitted; 1 the scheduler refused the script or did not answer, and the script is kept in its file;
2 wrong usage, or no command of the scheduler on PATH, and nothing was written; with --on spark the code of the job,
whose script is kept too, or 1 if pyspark or Java is missing. The script of a job ends with the code of its ranks, or
with 75 if they saved their state before the time limit and the scheduler does not requeue the job.
"""
_DASHED = ("-o", "--directive", "--setup", "--env", "--wrap")  # options whose values may begin with a dash

KNOWN = {
    "--site": Known(presets(), has_sites=True),
    "--mpi": Known((*MPIS, "jsrun", *SRUN_MPI)),
    "--nodes": Known(("auto",)),
    "--filesystems": Known(("home", "eagle", "flare"), is_list=True),  # of Polaris and Aurora
    "--master": Known(("yarn",)),
}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "submit",
        help="write the script of a job for a cluster's scheduler, and submit it",
        description=_HELP,
        epilog=_EPILOG,
        usage="choros submit [--on SCHEDULER] [OPTIONS] (script.py | -m module | program) [ARGS ...]",
        allow_abbrev=False,
    )
    _add_cluster(parser.add_argument_group("cluster").add_argument)
    _add_resources(parser.add_argument_group("resources").add_argument)
    _add_ranks(parser.add_argument_group("ranks").add_argument)
    _add_kubernetes_and_spark(parser)
    _add_script(parser.add_argument_group("script").add_argument)
    add = parser.add_argument
    add("--written-by", default="", help=argparse.SUPPRESS)
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("target", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="the program that the ranks run")


def _add_cluster(add: Callable[..., Any]) -> None:
    """Add the options that name the cluster and its scheduler."""
    add(
        "--on",
        choices=sorted(SCHEDULERS),
        help="scheduler (default: the site's, else that of ~/.config/choros/config.toml, else the one whose command is "
        "on PATH; k8s and spark must be named)",
    )
    add(
        "--site",
        default="",
        metavar="NAME",
        help=f"cluster: {', '.join(site_names())}, or a file such as ./mine.toml (default: that of "
        "~/.config/choros/config.toml, else generic, which assumes nothing)",
    )
    add("--account", default="", metavar="NAME", help="project or bank that is charged (default: the scheduler's)")
    add(
        "--queue",
        "--partition",
        default="",
        metavar="NAME",
        help="queue or partition, such as debug (default: the scheduler's)",
    )
    add(
        "--filesystems",
        metavar="NAMES",
        help="file systems that the job uses, with colons or commas between them, such as home:eagle; for PBS, "
        "if the site needs them",
    )
    add(
        "-o",
        "--directive",
        action="append",
        default=[],
        help="option that is passed on to the scheduler, such as -o '--constraint=cpu'; repeatable",
    )


def _add_resources(add: Callable[..., Any]) -> None:
    """Add the options for nodes, cores, GPUs and time."""
    add(
        "--nodes",
        type=_nodes,
        metavar="N",
        help="number of nodes (default: 1); auto takes YARN's active nodes (--on spark --master yarn)",
    )
    add("--ranks-per-node", type=_count, metavar="N", help="number of ranks on each node (default: 1, or the site's)")
    add("--cores", type=_count, metavar="N", help="number of cores of each rank (default: 1, or the site's)")
    add(
        "--threads-per-core",
        type=_whole,
        default=0,
        metavar="N",
        help="number of hardware threads used of each core, such as 2 (default: the scheduler's)",
    )
    add("--gpus", type=_whole, metavar="N", help="number of GPUs of each rank (default: 0, or the site's)")
    add("--time", metavar="H:MM:SS", help="time limit, such as 1:30:00, 90m or 1h30m (default: the queue's)")
    add(
        "--signal",
        type=_whole,
        metavar="S",
        help="seconds before the time limit at which the ranks receive a signal (default: 90; 0: never)",
    )


def _add_ranks(add: Callable[..., Any]) -> None:
    """Add the options for the commands and the environment of the ranks."""
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="line of shell before the ranks start, such as 'module load python'; repeatable",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="environment variable of the ranks, such as KERAS_BACKEND=jax; repeatable",
    )
    add(
        "--wrap",
        default="",
        metavar="COMMAND",
        help="command that starts each rank, such as 'numactl --localalloc'; %%r in it is the rank",
    )
    add(
        "--mpi",
        default="",
        metavar="NAME",
        help=f"MPI whose mpiexec starts the ranks: {', '.join(MPIS)} (HPE Cray); with --on lsf also jsrun; with --on "
        "slurm also a value of srun --mpi= (default: the site's, else the one that mpi4py loads here)",
    )
    add(
        "--python",
        metavar="PROGRAM",
        help="Python interpreter of the ranks (default: this one; 'python' with --setup or --on k8s)",
    )


def _add_kubernetes_and_spark(parser: argparse.ArgumentParser) -> None:
    """Add the options of the schedulers that are not batch schedulers."""
    add = parser.add_argument_group("Kubernetes").add_argument
    add("--image", default="", help="image of the container, with Choros and the script in it")
    add("--kind", choices=("job", "jobset", "trainjob"), help="kind of the manifest (default: job)")
    add("--runtime", metavar="NAME", help="runtime of a TrainJob (default: torch-distributed)")
    add = parser.add_argument_group("Spark").add_argument
    add("--master", default="", metavar="URL", help="URL of the cluster: spark://head:7077, yarn or sc://head")
    add("--archive", default="", metavar="FILE", help="environment of the executors, a file of choros spark pack")
    add("--max-nodes", type=_count, metavar="N", help="largest number that --nodes auto takes (default: all)")
    add(
        "--resource-manager",
        default="",
        metavar="HOST:PORT",
        help="web address of YARN's ResourceManager, for --nodes auto (default: that of yarn-site.xml)",
    )


def _add_script(add: Callable[..., Any]) -> None:
    """Add the options for the script that is written."""
    add("--name", metavar="NAME", help="name of the job and of its log (default: the script's)")
    add("--script", metavar="FILE", help="file that the script is written to (default: NAME.SCHEDULER.sh)")
    add("--dry-run", action="store_true", help="print the script, and do nothing else")


def before_parsing(arguments: Sequence[str]) -> list[str]:
    """Attach values that may begin with a dash to their option, and add ``--written-by`` with the whole command.

    Raises:
        InvalidInputError: the scheduler is Cobalt, and the message has the line for PBS; or an option is not valid.

    Example:
        >>> before_parsing(["submit", "-o", "-l a=b", "--env", "A=-1", "a.py", "-o", "x"])[3:]
        ['-o-l a=b', '--env=A=-1', 'a.py', '-o', 'x']
    """
    remaining, made = list(arguments), list[str]()
    while remaining and remaining[0] != "submit":
        made.append(remaining.pop(0))
    if cobalt.is_asked(remaining[1:]):
        if cobalt.is_help_asked(remaining[1:]):
            return [*made, "submit", "--help"]
        job = cobalt.translate(remaining[1:])
        _refuse_invalid(job.options)
        raise InvalidInputError(job.text)
    arguments_shown = [argument for argument in remaining[1:] if argument != "--dry-run"]
    made += [*remaining[:1], "--written-by", shlex.join(["choros", "submit", *arguments_shown]).replace("\n", " ")]
    remaining = remaining[1:]
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-m", "--"):
        option = remaining.pop(0)
        if option in _DASHED and remaining:
            if remaining[0] in _options():
                raise InvalidInputError(
                    f"{option} needs a value, and {remaining[0]} is an option: if it is the value, write "
                    f"{option}{'=' if option.startswith('--') else ''}{remaining[0]}"
                )
            made.append(f"{option}{'=' if option.startswith('--') else ''}{remaining.pop(0)}")
            continue
        made.append(option)
        if option.startswith("--") and "=" not in option and option not in ("--dry-run", "--help") and remaining:
            made.append(remaining.pop(0))
    return made + remaining


def _options() -> set[str]:
    """Return the long options of the command."""
    commands = Parser(prog="choros").add_subparsers()
    add_parser(commands)
    parser: Parser = commands.choices["submit"]
    return {text for action in parser.visible_options() for text in action.option_strings if text.startswith("--")}


def _refuse_invalid(options: Sequence[str]) -> None:
    """Refuse options of ``choros submit`` as for a job with them; end with code 2 if one is unknown."""
    commands = Parser(prog="choros").add_subparsers()
    add_parser(commands)
    _, *words = before_parsing(["submit", *options, "-m", "train"])
    args, unknown = commands.choices["submit"].parse_known_args(words)
    if unknown or args.target != ["train"]:  # the value of an unknown option is taken for the target
        args.parser.refuse(unknown or options)
    scheduler, job, _ = _scheduler_and_job(args)
    scheduler.script(job)


def main(args: argparse.Namespace) -> int:
    """Write the script, submit it and print the job's id.

    Args:
        args: the parsed arguments.

    Returns:
        0; for Spark, the exit code of the job.

    Raises:
        InvalidInputError: an argument is not valid, and nothing was written.
        SchedulerError: the scheduler refuses the script, which is kept, or does not answer.
    """
    scheduler, job, warning = _scheduler_and_job(args)
    text = scheduler.script(job)
    for problem in (srun_mpi_warning(job.mpi) if scheduler.name == "slurm" else "", warning):
        if problem:
            print(f"choros submit: warning: {problem}", file=sys.stderr)
    if scheduler.attached:
        _warn_of_local_workers(job)
    announce()
    if args.dry_run:
        sys.stdout.write(text)
        return 0
    if scheduler.attached:
        _prepare_spark(scheduler, job)
        write_script(job.script, text)
        return subprocess.call(scheduler.submit(job.script))
    require_program(scheduler)
    write_script(job.script, text)
    print(submit_job(scheduler, job.script))
    return 0


def _scheduler_and_job(args: argparse.Namespace) -> tuple[Scheduler, Job, str]:
    """Return the scheduler and the job for the options, after a check of both; and a warning, or ""."""
    options = JobOptions(**{field.name: getattr(args, field.name) for field in fields(JobOptions)})
    target = args.target[1:] if args.target[:1] == ["--"] else args.target
    scheduler, site, defaults = complete(options, partial(_choose, target, args.module))
    on, written_by = scheduler.name, args.written_by
    if defaults:
        print(f"choros submit: from {config_file()}: {defaults}", file=sys.stderr)
        written_by = written_by.replace("choros submit", f"choros submit {defaults}", 1)
    _ask_for_nodes(options)
    here = on != "k8s" and not options.setup
    command = command_of(target, args.module, name="submit", python=options.interpreter(on), here=here)
    if options.archive and "://" not in options.archive and not os.path.isfile(options.archive):
        raise InvalidInputError(
            f"--archive {options.archive} is not a file (the directory is {os.getcwd()}): choros spark pack makes one"
        )
    options.name = options.name or name_of(target[0])
    job = job_of(options, site, on, command, written_by)
    return scheduler, job, transport_warning(options, scheduler, job)


def _choose(target: Sequence[str], is_module: bool, name: str) -> Scheduler:
    """Return the scheduler; a script that is missing is reported first.

    Args:
        target: the words of the target.
        is_module: whether the target is a module.
        name: the scheduler's name; "" for that of this machine.
    """
    if name != "k8s" and not is_module and target and is_script(target[0]):  # a container has its own files
        check_script(target[0])
    try:
        return choose_scheduler("choros submit", name, attached=True)
    except InvalidInputError as error:
        if name or "--on" not in target:
            raise
        raise InvalidInputError(f"{error}; --on comes before {target[0]}, which gets all words after it") from None


def _nodes(text: str) -> int | str:
    """Return a number of nodes, or ``"auto"``."""
    return text if text == "auto" else _limited(count(text, ", or auto"))


def _count(text: str) -> int:
    """Return a number of 1 or more that a job may have."""
    return _limited(count(text))


def _whole(text: str) -> int:
    """Return a number of 0 or more that a job may have."""
    return _limited(whole(text))


def _limited(number: int) -> int:
    if number > MOST:
        raise argparse.ArgumentTypeError(f"must be {MOST} or less, got {number}")
    return number


def _ask_for_nodes(options: JobOptions) -> None:
    """Replace ``--nodes auto`` by the number of YARN's active nodes, at most ``--max-nodes``."""
    if options.nodes != "auto":
        for name, value in {"--max-nodes": options.max_nodes, "--resource-manager": options.resource_manager}.items():
            if value:
                raise InvalidInputError(f"{name} is for --nodes auto: give that too, or leave {name} out")
        return
    if options.on != "spark" or options.master != "yarn":
        raise InvalidInputError(
            "--nodes auto is for --on spark --master yarn: elsewhere give a number, as in --nodes 4"
        )
    active, url = active_nodes(options.resource_manager)
    options.nodes = min(active, options.max_nodes or active)
    print(f"choros submit: YARN has {active} active nodes ({url}): --nodes {options.nodes}", file=sys.stderr)


def _warn_of_local_workers(job: Job) -> None:
    """Warn if a script for Spark does not name Spark: its ``Trainer`` would start workers on this machine."""
    path, *arguments = job.command[1:]
    with suppress(OSError):
        if path.endswith(".py") and not names_spark(Path(path).read_text(errors="replace"), arguments):
            print(
                f'choros submit: warning: {path} does not name Spark. Without launcher="spark" a Trainer starts its '
                'workers on this machine, not on the cluster: give Trainer(..., launcher="spark"), or use '
                "choros.spark.KerasEstimator. (Ignore this if another file of the program does.)",
                file=sys.stderr,
            )


def _prepare_spark(scheduler: Scheduler, job: Job) -> None:
    """Put this environment's programs at the end of ``PATH``, and check that a Spark job's driver can run here."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    if not job.master.startswith("sc://"):
        if shutil.which(scheduler.program) is None:
            raise MissingPackageError(
                f"there is no {scheduler.program} on PATH: pip install 'choros[spark]' brings one"
            )
        ensure_java()
