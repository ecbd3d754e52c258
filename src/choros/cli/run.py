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

from choros.backend_choice import announce
from choros.cli.arguments import Known, add_workers_option, count, seconds, some_seconds, whole
from choros.cli.command_target import command_of
from choros.cluster import is_this_machine
from choros.cluster.hardware import raise_descriptors
from choros.cluster.hardware.network_address import own_address
from choros.device_choice import SHARE
from choros.errors import InvalidInputError
from choros.launch.elastic.driver import start_elastic
from choros.launch.elastic.settings import terms_of
from choros.launch.horovod_options import OPTIONS, Option
from choros.launch.local_job import LaunchOptions, check_outside, horovod_variables, size_of, slots_of, start
from choros.launch.mpi.launcher import LAUNCHERS, start_under
from choros.launch.process.rank_limit import check_ranks, crowding
from choros.launch.process.rank_supervisor import GRACE, JobResult
from choros.launch.restart import run_with_restarts
from choros.launch.retired import aprun
from choros.launch.ssh.launcher import SSH, check_ssh, start_on_hosts

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Each rank finds its numbers in CHOROS_RANK, CHOROS_SIZE, CHOROS_LOCAL_RANK and CHOROS_LOCAL_SIZE. Before anything is
imported it is bound to cores of its own and its number of threads is set. A host takes more ranks than cores, up to 64
for each core and at least 256, unless its limits of processes and open files are lower. All GPUs stay visible; hvd.init
and Trainer choose the one of the local rank. Each line of output is marked with its rank. The first rank that fails
ends all others and gives the exit code; in an elastic job (--min-np or --host-discovery-script) the others continue
from the last commit: see choros.hvd.elastic. The other options of horovodrun are accepted: each is ignored or refused,
and a line gives the reason.
"""
_EPILOG = """\
examples:
  choros run -n 4 train.py --epochs 3             four ranks on this machine
  choros run -H n1:4,n2:4 train.py                four ranks on each of two hosts, started by ssh
  choros run -n 8 --launcher srun train.py        in an allocation of SLURM
  choros run -n 4 --restarts 2 train.py           the whole job again after a failure, at most twice
  choros run --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh train.py

Exit codes: 0; the code of the rank that failed first (128 + N if signal N ended it); 75 if a signal asked the ranks to
end, and they saved their state, so that the job can be submitted again; 2 wrong usage, and nothing was started; 1 the
ranks could not be started; 130 interrupted (Ctrl-C).
"""
_ON: dict[str, Any] = {"action": "store_const", "const": True}
_OFF: dict[str, Any] = {"action": "store_const", "const": False}

KNOWN = {"--launcher": Known(("ssh", *LAUNCHERS))}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "run",
        help="run N ranks of a script on this machine or on hosts",
        description=_HELP,
        epilog=_EPILOG,
        usage="choros run -n N [OPTIONS] (script.py | -m module | program) [ARGS ...]",
        allow_abbrev=False,  # else argparse takes options of the script for abbreviations of these
    )
    _add_places(parser)
    _add_computing(parser.add_argument_group("what each rank computes with").add_argument)
    _add_failures(parser.add_argument_group("failures").add_argument)
    _add_elastic_options(parser.add_argument_group("elastic jobs").add_argument)
    _add_output(parser.add_argument_group("output").add_argument)
    _add_horovod_options(parser.add_argument_group("Horovod's options").add_argument)
    add = parser.add_argument
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


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where ranks run, and how they are started."""
    group = parser.add_argument_group("where ranks run")
    add = group.add_argument
    add_workers_option(add, "number of ranks (default: all slots of --hosts or --hostfile)")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts, each with the most ranks that it may have, such as n1:4,n2:4 (default: this machine)",
    )
    hosts.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help='file of hosts with lines such as "n1 slots=4", instead of -H'
    )
    add(
        "--launcher",
        default="ssh",
        metavar="NAME",
        help="program that starts the ranks on other hosts: ssh (default); in an allocation also srun or mpiexec",
    )
    add("--ssh", default=SSH, metavar="COMMAND", help=f"command that runs a program on another host (default: {SSH})")
    add("-p", "--ssh-port", type=count, metavar="PORT", help="port of ssh on the other hosts (default: ssh's own)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh, such as ~/.ssh/id_ed25519")
    add(
        "--network",
        "--network-interfaces",
        "--network-interface",
        default=os.environ.get("CHOROS_NETWORK", ""),
        metavar="NAME",
        help="interface (ib0), address range (10.0.0.0/16) or domain (.hsn.example.org) by which the hosts reach each "
        "other (default: CHOROS_NETWORK, else the route to the other hosts)",
    )


def _add_computing(add: Callable[..., Any]) -> None:
    """Add the options for cores, threads and GPUs."""
    add("--threads", type=count, metavar="T", help="threads of each rank (default: its number of cores)")
    add("--no-bind", action="store_true", help="leave ranks unbound (default: each rank is bound to cores of its own)")
    add("--share-gpus", action="store_true", help="let several ranks use one GPU (default: refused)")


def _add_failures(add: Callable[..., Any]) -> None:
    """Add the options for ranks that fail or hang."""
    add(
        "--grace",
        type=seconds,
        default=GRACE,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when the job ends (default: 5)",
    )
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
        help="number of times that the whole job is started again after a failure; fit(checkpoint=, resume=True) "
        "resumes (default: 0)",
    )


def _add_elastic_options(add: Callable[..., Any]) -> None:
    """Add the options of an elastic job."""
    add(
        "--min-np",
        "--min-num-proc",
        dest="least",
        type=count,
        metavar="N",
        help="least number of ranks; makes the job elastic (default: the number of -n)",
    )
    add(
        "--max-np",
        "--max-num-proc",
        dest="most",
        type=count,
        metavar="N",
        help="largest number of ranks (default: all slots)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="program that prints a line host:slots for each available host; run about once a second; makes the job "
        "elastic",
    )
    add(
        "--slots-per-host",
        type=count,
        metavar="N",
        help="slots of a host that the discovery script prints without slots (default: 1)",
    )
    add(
        "--elastic-timeout",
        type=some_seconds,
        metavar="S",
        help="seconds to wait for the least number of ranks before the job ends (default: 600)",
    )
    add(
        "--reset-limit",
        type=whole,
        metavar="K",
        help="number of changes of the ranks after which the job ends (default: no limit)",
    )
    add(
        "--blacklist-cooldown-range",
        dest="cooldown",
        nargs=2,
        type=some_seconds,
        metavar=("MIN", "MAX"),
        help="seconds until a host whose rank failed is used again, from MIN to MAX (default: never)",
    )


def _add_output(add: Callable[..., Any]) -> None:
    """Add the options for the output of the ranks and of the command."""
    add("--output-filename", metavar="DIR", help="directory for DIR/rank.N/stdout and stderr, besides the terminal")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="put the time before each line",
    )
    add("--verbose", action="store_true", help="print each rank's cores, threads and command")
    add("-cb", "--check-build", action="store_true", help="print the available backends and transports, and exit")
    add("-v", "--version", action="version", version=f"choros {metadata.version('choros')}", help=argparse.SUPPRESS)


def _add_horovod_options(add: Callable[..., Any]) -> None:
    """Add the options for the timeline and the stall check of ``choros.hvd``."""
    add("--timeline-filename", metavar="FILE", help="file for a timeline of the collective operations, such as t.json")
    add("--timeline-mark-cycles", dest="mark_cycles", **_ON, help="mark cycles in the timeline (default: no)")
    add("--no-timeline-mark-cycles", dest="mark_cycles", **_OFF, help=argparse.SUPPRESS)
    add("--no-stall-check", dest="stall_off", **_ON, help="do not look for ranks that stall (default: look)")
    add("--stall-check", dest="stall_off", **_OFF, help=argparse.SUPPRESS)
    add(
        "--stall-check-warning-time-seconds",
        type=seconds,
        metavar="S",
        help="seconds of a stall after which a warning is printed (default: 60)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        type=seconds,
        metavar="S",
        help="seconds of a stall after which the job ends (default: 0, which means 1800)",
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


def _check_launcher_options(args: argparse.Namespace, is_elastic: bool) -> None:
    """Refuse options for ranks that ``choros run`` starts itself, if another program starts them.

    Raises:
        InvalidInputError: such an option is given with ``--launcher``.
    """
    if args.launcher == "ssh":
        return
    if is_elastic:
        raise InvalidInputError(f"the ranks of an elastic job are started by ssh, not by --launcher {args.launcher}")
    launcher_only = {
        "--output-filename": args.output_filename,
        "--prefix-output-with-timestamp": args.timestamps,
        "--ssh": args.ssh != SSH,
        "--ssh-port": args.ssh_port,
        "--ssh-identity-file": args.ssh_identity_file,
        "--verbose": args.verbose,
    }
    if any(launcher_only.values()):
        raise InvalidInputError(
            f"{', '.join(name for name, value in launcher_only.items() if value)}: for ranks that choros run starts "
            f"itself. With --launcher {args.launcher} leave it out; that program starts them, and has options of its "
            "own"
        )


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
    _check_launcher_options(args, is_elastic=terms is not None)
    command = command_of(args.target, args.module)
    size = terms.first if terms is not None else size_of(args.workers, args.hosts, args.hostfile, here=False)
    if size is None:
        raise InvalidInputError(
            "give the number of ranks, before the program: -n N (or -np N, -H localhost:N, --hostfile FILE)"
        )
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
    network = args.network.split(",")[0]
    environment |= {SHARE: "1"} if args.share_gpus else {}
    environment |= {"CHOROS_NETWORK": network} if network else {}
    options = LaunchOptions(
        size, args.threads, not args.no_bind, args.grace, args.output_filename, args.timestamps, environment
    )
    port = f" -p {args.ssh_port}" if args.ssh_port else ""
    key = f" -i {shlex.quote(args.ssh_identity_file)}" if args.ssh_identity_file else ""
    ssh = f"{args.ssh}{port}{key}"
    is_local = all(is_this_machine(host) for host, _ in slots)
    if args.launcher == "ssh" and not is_local:
        check_ssh(ssh)
    elif args.launcher == "ssh":
        if network:
            own_address(network)  # the ranks would refuse it later; between hosts the launchers look for it
        if terms is None:
            check_ranks(size)
            if warning := crowding(size, "ranks", "-n "):
                print(f"choros run: warning: {warning}", file=sys.stderr)

    def once(more: dict[str, str]) -> JobResult:
        attempt = replace(options, variables={**environment, **more})
        if terms is not None:
            return start_elastic(command, attempt, terms, ssh=ssh, network=network, verbose=args.verbose)
        if args.launcher != "ssh":
            return start_under(args.launcher, command, attempt, slots, network)
        if is_local:
            return start(command, attempt, verbose=args.verbose)
        return start_on_hosts(command, attempt, slots, ssh=ssh, network=network, verbose=args.verbose)

    announce()
    return run_with_restarts(once, args.restarts).code
