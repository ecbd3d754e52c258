"""``choros run -n 4 [OPTIONS] script.py ARGS``: run N ranks of a script, here or on other hosts.

It also takes the options of ``horovodrun``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choros.cli.arguments import count, seconds, some_seconds, whole
from choros.cli.command_target import command_of
from choros.cluster import is_this_machine
from choros.cluster.hardware import raise_descriptors
from choros.device_choice import SHARE
from choros.errors import InvalidInputError
from choros.launch.elastic.driver import start_elastic
from choros.launch.elastic.settings import terms_of
from choros.launch.horovod_options import OPTIONS, Option
from choros.launch.local_job import LaunchOptions, check_outside, horovod_variables, size_of, slots_of, start
from choros.launch.mpi.launcher import start_under
from choros.launch.process.rank_supervisor import GRACE, JobResult
from choros.launch.restart import again
from choros.launch.retired import aprun
from choros.launch.ssh.launcher import SSH, start_on_hosts

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Each rank finds its numbers in CHOROS_RANK, CHOROS_SIZE, CHOROS_LOCAL_RANK and CHOROS_LOCAL_SIZE. Before anything is
imported it is bound to cores of its own and its number of threads is set. All GPUs stay visible; hvd.init and Trainer
choose the one of the local rank. Each line of output is marked with its rank. The first rank that fails ends all others
and gives the exit code; in an elastic job (--min-np or --host-discovery-script) the others continue from the last
commit: see choros.hvd.elastic. The other options of horovodrun are accepted: each is ignored or refused, and a line
gives the reason.
"""
_ON: dict[str, Any] = {"action": "store_const", "const": True}
_OFF: dict[str, Any] = {"action": "store_const", "const": False}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "run",
        help="run N ranks of a script on this machine or on hosts",
        description=_HELP,
        usage="choros run -n N [OPTIONS] (script.py | -m module | program) [ARGS ...]",
        allow_abbrev=False,  # else argparse takes options of the script for abbreviations of these
    )
    add = parser.add_argument
    add("-n", "-np", "--num-proc", "--workers", dest="workers", type=count, metavar="N", help="how many ranks")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each may have: n1:4,n2:4"
    )
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help='the same as lines "host slots=4" of a file')
    add(
        "--launcher",
        default="ssh",
        metavar="NAME",
        help="the program that starts the ranks: ssh (default), or srun or mpiexec in an allocation",
    )
    add(
        "--ssh",
        default=SSH,
        metavar="COMMAND",
        help=f"the program that runs a command on another host (default: {SSH})",
    )
    add("-p", "--ssh-port", type=count, metavar="PORT", help="the port of ssh on the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the key for ssh")
    add(
        "--network",
        "--network-interfaces",
        "--network-interface",
        default=os.environ.get("CHOROS_NETWORK", ""),
        metavar="NAME",
        help="the interface (eth0), or the domain (.hsn.example.org), by which the hosts reach each other",
    )
    add("--threads", type=count, metavar="T", help="threads of each rank (default: its cores)")
    add("--no-bind", action="store_true", help="do not bind ranks to cores")
    add("--share-gpus", action="store_true", help="let several ranks compute on one GPU, which is refused otherwise")
    add("--grace", type=seconds, default=GRACE, metavar="S", help="seconds between SIGTERM and SIGKILL (default: 5)")
    add(
        "--start-timeout",
        type=some_seconds,
        metavar="S",
        help="seconds that hvd.init may wait for all ranks (default: 30)",
    )
    add(
        "--restarts",
        type=whole,
        default=0,
        metavar="K",
        help="start the whole job again when it fails, at most K times; fit(checkpoint=, resume=True) resumes",
    )
    _add_elastic_options(add)
    add("--output-filename", metavar="DIR", help="also write the output of rank N to DIR/rank.N/stdout and stderr")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="put the time before each line",
    )
    add("--timeline-filename", metavar="FILE", help="write a timeline of the collective operations (HOROVOD_TIMELINE)")
    add("--timeline-mark-cycles", dest="mark_cycles", **_ON, help="mark cycles in it")
    add("--no-timeline-mark-cycles", dest="mark_cycles", **_OFF, help=argparse.SUPPRESS)
    add("--no-stall-check", dest="stall_off", **_ON, help="do not look for ranks that stall")
    add("--stall-check", dest="stall_off", **_OFF, help=argparse.SUPPRESS)
    add("--stall-check-warning-time-seconds", type=seconds, metavar="S", help="report a stall after S (default: 60)")
    add(
        "--stall-check-shutdown-time-seconds",
        type=seconds,
        metavar="S",
        help="end the job after a stall of S (default: 0, which means 1800)",
    )
    add("-cb", "--check-build", action="store_true", help="print the available backends and transports, and exit")
    add("--verbose", action="store_true", help="print each rank's cores, threads and command")
    add("-v", "--version", action="version", version=f"choros {metadata.version('choros')}", help=argparse.SUPPRESS)
    for retired in aprun.OPTIONS:
        add(*retired.names, action=_Record, dest="aprun", option=retired, nargs=None if retired.values else 0)
    for option in OPTIONS:
        add(
            *option.names,
            action=_Record,
            dest="others",
            option=option,
            nargs=None if option.values == 1 else option.values,
        )
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("target", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="the program that the ranks run")


def _add_elastic_options(add: Callable[..., Any]) -> None:
    """Add the options of an elastic job."""
    add("--min-np", "--min-num-proc", dest="least", type=count, metavar="N", help="elastic job: at least N ranks")
    add("--max-np", "--max-num-proc", dest="most", type=count, metavar="N", help="at most N (default: all slots)")
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="elastic job: a program that prints a line host:slots for each available host; run about once a second",
    )
    add("--slots-per-host", type=count, metavar="N", help="slots of a host that it lists without slots (default: 1)")
    add("--elastic-timeout", type=some_seconds, metavar="S", help="end when short of ranks for S (default: 600)")
    add("--reset-limit", type=whole, metavar="K", help="end when the ranks change more than K times")
    add(
        "--blacklist-cooldown-range",
        dest="cooldown",
        nargs=2,
        type=some_seconds,
        metavar=("MIN", "MAX"),
        help="seconds until a host whose rank failed is used again, from MIN to MAX (default: never)",
    )


class _Record(argparse.Action):
    """Action that adds (option, name, value) to a tuple of the namespace, for an answer or an error of ``main``.

    It is for options of another launcher: of horovodrun in ``others``, of aprun in ``aprun``.
    """

    def __init__(self, option: Option | aprun.AprunOption, dest: str, **more: Any) -> None:
        super().__init__(**more, dest=dest, default=(), help=argparse.SUPPRESS)
        self.option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), (self.option, option_string, values or "")))


def _refuse_aprun(args: argparse.Namespace) -> None:
    """Raise the translation of ``--launcher aprun``, or the equivalent of an option of ``aprun`` elsewhere."""
    if Path(args.launcher).name == "aprun":
        aprun_options = [(name, value) for _, name, value in args.aprun]
        ranks = [("-n", str(args.workers))] if args.workers else []
        raise InvalidInputError(aprun.translation([*ranks, *aprun_options], args.target, args.module))
    for option, name, _ in args.aprun:
        raise InvalidInputError(f"{name} is an option of aprun, not of choros run: {option.instead}")


def main(args: argparse.Namespace) -> int:
    """Run the ranks.

    Args:
        args: the parsed arguments.

    Returns:
        The exit code of the run.

    Raises:
        InvalidInputError: the command or the number of ranks is missing, an option is refused, or this process is
            already a rank.
    """
    _refuse_aprun(args)
    raise_descriptors()
    answers = [option.answer(name) for option, name, _ in args.others]
    if args.check_build:
        from choros.cli.check_build import report

        print(report())
        return 0
    slots = slots_of(args.hosts, args.hostfile)
    terms = terms_of(
        args.workers,
        args.least,
        args.most,
        slots,
        script=args.host_discovery_script,
        each=args.slots_per_host,
        timeout=args.elastic_timeout,
        resets=args.reset_limit,
        cooldown=args.cooldown and tuple(args.cooldown),
    )
    if terms is not None and args.launcher != "ssh":
        raise InvalidInputError(f"the ranks of an elastic job are started by ssh, not by --launcher {args.launcher}")
    launcher_only = {
        "--output-filename": args.output_filename,
        "--prefix-output-with-timestamp": args.timestamps,
        "--ssh": args.ssh != SSH,
        "--ssh-port": args.ssh_port,
        "--ssh-identity-file": args.ssh_identity_file,
        "--verbose": args.verbose,
    }
    if args.launcher != "ssh" and any(launcher_only.values()):
        raise InvalidInputError(
            f"{', '.join(name for name, value in launcher_only.items() if value)}: for ranks that choros run starts "
            f"itself. With --launcher {args.launcher} leave it out; that program starts them, and has options of its "
            "own"
        )
    size = terms.first if terms is not None else size_of(args.workers, args.hosts, args.hostfile, here=False)
    if size is None:
        raise InvalidInputError("give the number of ranks: -n N (or -np N, -H localhost:N, --hostfile FILE)")
    command = command_of(args.target, args.module)
    check_outside("run the script itself there, without 'choros run'")
    for line in answers:
        print(f"choros run: {line}", file=sys.stderr)
    environment = horovod_variables(
        start_timeout=args.start_timeout,
        timeline=args.timeline_filename,
        mark_cycles=args.mark_cycles,
        stall_off=args.stall_off,
        stall_warning=args.stall_check_warning_time_seconds,
        stall_shutdown=args.stall_check_shutdown_time_seconds,
    )
    environment |= {SHARE: "1"} if args.share_gpus else {}
    wish = LaunchOptions(
        size, args.threads, not args.no_bind, args.grace, args.output_filename, args.timestamps, environment
    )
    port = f" -p {args.ssh_port}" if args.ssh_port else ""
    key = f" -i {shlex.quote(args.ssh_identity_file)}" if args.ssh_identity_file else ""
    ssh, network = f"{args.ssh}{port}{key}", args.network.split(",")[0]
    is_local = all(is_this_machine(host) for host, _ in slots)

    def once(more: dict[str, str]) -> JobResult:
        this = replace(wish, variables={**environment, **more})
        if terms is not None:
            return start_elastic(command, this, terms, ssh=ssh, network=network, verbose=args.verbose)
        if args.launcher != "ssh":
            return start_under(args.launcher, command, this, slots, network)
        if is_local:
            return start(command, this, verbose=args.verbose)
        return start_on_hosts(command, this, slots, ssh=ssh, network=network, verbose=args.verbose)

    return again(once, args.restarts).code
