"""The driver of an elastic job: ranks join and leave, and the others continue from their last commit.

Each change makes a new generation. A process requests its place when it starts, and when ``hvd.elastic.run`` restarts.
The driver replies when all live processes of the last generation have requested one. ``members`` has the decisions.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from choros.cluster import is_this_machine
from choros.errors import InvalidInputError
from choros.launch.elastic.control_server import ControlServer
from choros.launch.elastic.host_discovery import Discovery
from choros.launch.elastic.members import (
    IN,
    LEAVING,
    READY,
    STARTING,
    Blacklist,
    Member,
    ordered,
    places,
    surplus,
    vacancies,
)
from choros.launch.elastic.messages import (
    AssignRank,
    GenerationBroken,
    Leave,
    Ping,
    ProcessGreeting,
    RanksChange,
    RequestRank,
    SharedTexts,
    ShareText,
)
from choros.launch.elastic.process_starter import ProcessStarter
from choros.launch.elastic.settings import ElasticSettings
from choros.launch.local_job import LaunchOptions
from choros.launch.process.child_process import ExitStatus
from choros.launch.process.rank_limit import check_ranks
from choros.launch.process.rank_output import Output
from choros.launch.process.rank_supervisor import JobResult, RankSupervisor, fate

if TYPE_CHECKING:
    from choros.cluster.host_slots import Slots

_PING_SECONDS = 1.0  # between two pings of a process
_LEAVE_SECONDS = 30.0  # that a process may take to end after the message that it has no place


class Driver(RankSupervisor):
    """Supervisor that starts, watches and ends the processes of an elastic job, and forms its generations.

    Args:
        starter: ProcessStarter. Prepares the start of a process.
        settings: ElasticSettings. The settings of the job.
        options: LaunchOptions. The options of the launch.
        output: Output. The receiver of the processes' lines.
        control_server: function that makes the ControlServer, from the function to call when a message arrives.
    """

    def __init__(
        self,
        starter: ProcessStarter,
        settings: ElasticSettings,
        options: LaunchOptions,
        output: Output,
        control_server: Callable[[Callable[[], None]], ControlServer],
    ) -> None:
        super().__init__(options.grace, output, on_line=self._write_line)
        self.settings, self.starter = settings, starter
        self.members: dict[int, Member] = {}
        self.generation, self.resets = 0, 0
        self.running = False  # whether no failure of this generation is known
        self.finishing = False  # whether a rank has ended with code 0
        self.failures: list[ExitStatus] = []  # of this generation, or before the first one
        self.blacklist = Blacklist(settings.cooldown)
        self._start_timeout = float((options.variables or {}).get("HOROVOD_START_TIMEOUT", 30.0))
        self._shared_texts: dict[int, str] = {}  # of this generation, by number of the process
        self._announced = (0, False)  # number of RanksChange messages to this generation; whether ranks join
        self._shortage_since = 0.0  # the time since which too few ranks are ready; 0: there are enough
        self._reset_since = 0.0  # the time since which ranks wait for a new generation; 0: none waits
        self._pinged = 0.0
        self._exit_code: int | None = None  # None until the job is ending
        self.control_server = control_server(self.wake)
        self.discovery = Discovery(
            list(settings.script), settings.hosts, settings.each, changed=self.wake, report=output.say
        )

    def watch(self) -> JobResult:
        """Run the job to its end; return the outcome."""
        while self._exit_code is None or len(self.ended) < len(self.pump.children):
            self._wait()
            self._reap()
            while not self.control_server.received.empty():
                self._receive(*self.control_server.received.get())
            if (self._received_signals or self._broken) and not self._forwarded:
                self._forwarded = True
                self._stop(128 + (self._received_signals[0] if self._received_signals else signal.SIGPIPE), "")
            # After all ends and messages: a decision from a part of them could start processes that are not needed.
            if self._exit_code is None:
                self._decide()
            self._kill_late()
        return JobResult(self._exit_code, self._received_signals[0] if self._received_signals else 0)

    def end(self) -> None:
        """End host discovery, all processes and all connections."""
        self.discovery.close()
        super().end()
        self.control_server.close()

    def _write_line(self, number: int, kind: str, line: str) -> None:
        member = self.members.get(number)
        if member is not None and member.machine:  # its agent has marked the line with the rank
            self.output.write_line(number, kind, line, mark=False)
        else:
            self.output.write_line(number, kind, line)

    # -- events
    def _reap(self) -> None:
        for number, child in enumerate(self.pump.children):
            if number not in self.ended and (ended := child.check()) is not None:
                self.ended[number] = ended
                self.pump.pull(number)
                self._handle_end(self.members.pop(number), ended)

    def _handle_end(self, member: Member, ended: ExitStatus) -> None:
        """Handle the end of a process."""
        if self._exit_code is not None or member.state == LEAVING:
            return
        if ended.code == 0:
            self.finishing = self.finishing or member.rank >= 0 or not self.generation
            return
        event, remedy = fate(ended)
        self._report_failure(member, event, remedy)
        # A process that fails before it joins does not affect the running ranks, so it is not a failure of the job.
        if member.rank >= 0 or not self.generation:
            self.failures.append(ended)
        if member.rank >= 0:
            self._break_generation(f"{self._name(member)} {event}")

    def _report_failure(self, member: Member, event: str, remedy: str = "") -> None:
        seconds = self.blacklist.bar(member.host)
        new_ranks = "no more" if seconds == float("inf") else f"none for {seconds:.1f} s"
        survivors = sum(other.rank >= 0 for other in self.members.values() if other is not member)
        if member.rank < 0:
            others = "it had no rank yet"
        elif survivors:
            others = f"ranks of its generation that continue: {survivors}"
        else:
            others = "none of its generation is left"
        self.output.say(
            f"choros run: {self._name(member)} {event}; {others}; new ranks on {member.host}: {new_ranks}"
            + (f". {remedy}" if remedy else "")
        )

    def _name(self, member: Member) -> str:
        name = f"rank {member.rank}" if member.rank >= 0 else "a starting rank"
        pid = self.pump.children[member.number].pid
        return f"{name} (process {member.number}, pid {pid}, host {member.host})"

    def _receive(self, number: int, message: object) -> None:
        """Handle a message of a process."""
        member = self.members.get(number)
        if member is None:
            return
        # Any message shows that the process lives.
        member.answered = member.sent
        if isinstance(message, RequestRank) and self._exit_code is None and member.state != LEAVING:
            member.state, member.sync = READY, message.sync
            if member.rank >= 0 and message.lost:
                self._suspect(message.missing)
                reason = f"has lost its connection to other ranks: {message.lost[:500]}"
                self._break_generation(f"{self._name(member)} {reason}")
        elif isinstance(message, ShareText) and message.generation == self.generation and self.running:
            self._shared_texts[number] = message.text
            ranked = ordered(m for m in self.members.values() if m.rank >= 0)
            if all(other.number in self._shared_texts for other in ranked):
                self._send_all(SharedTexts(self.generation, [self._shared_texts[m.number] for m in ranked]))

    def _suspect(self, ranks: Collection[int]) -> None:
        for member in self.members.values():
            if member.rank in ranks and member.state == IN:
                member.suspect = True

    # -- actions
    def _break_generation(self, reason: str) -> None:
        """End this generation: send its ranks a message that aborts their waits for each other."""
        if self.running:  # several ranks report the same loss; only the first report ends the generation
            self.running, self._reset_since = False, time.monotonic()
            self._send_all(GenerationBroken(self.generation, reason))

    def _send_all(self, message: object) -> None:
        for member in self.members.values():
            if member.rank >= 0:
                self.control_server.send(member.number, message)

    def _decide(self) -> None:
        now = time.monotonic()
        slots = self.discovery.slots
        ranked = [member for member in self.members.values() if member.rank >= 0]
        if self.failures and not ranked and (self.generation or not self.members) and not self.finishing:
            why = "all ranks have failed" if self.generation else "no rank has reached hvd.init"
            self._stop(self.failures[0].code, why)
        elif self.finishing and not ranked:
            self._stop(self.failures[0].code if self.failures else 0, "")
        elif slots is not None:
            self._check_heartbeats(now, ranked)
            if not self.finishing:
                self._dismiss(surplus(slots, self._staying()), now)
                self._start(slots, now)
            self._update_generation(slots, ranked, now)
        else:
            self._wait_for_more((), 0, self.settings.first, now)

    def _staying(self) -> list[Member]:
        return [member for member in self.members.values() if member.state != LEAVING]

    def _start(self, slots: Slots, now: float) -> None:
        gone = surplus(slots, self._staying())
        staying = [member for member in self._staying() if member not in gone]
        for host in vacancies(slots, staying, self.blacklist.barred(), self.settings.most):
            number = len(self.pump.children)
            member = self.members[number] = self.starter.member(number, host, slots, self.members.values(), now)
            if not member.machine:
                self.output.keep(number)
            address = self.control_server.address
            command, environment, cores, fds = self.starter.prepare(member, address, self.settings.first)
            try:
                self.start(number, command, environment, cores, fds)
            except OSError as error:
                del self.members[number]
                raise InvalidInputError(f"a rank on {host} cannot be started: {error}") from None
            finally:
                for fd in fds:
                    os.close(fd)

    def _dismiss(self, members: Sequence[Member], now: float) -> None:
        """End processes that have neither a slot nor a rank; ranks without a slot leave at a commit."""
        for member in members:
            if member.rank < 0:
                self._end_member(member, now, self.grace)

    def _end_member(self, member: Member, now: float, limit: float) -> None:
        member.state, member.rank, member.until = LEAVING, -1, now + limit
        # A process that has not connected yet gets no message, only a signal.
        if not self.control_server.send(member.number, Leave()):
            self.pump.children[member.number].send_signal(signal.SIGTERM)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for member in self.members.values():
            if now > member.until:
                self.pump.children[member.number].send_signal(signal.SIGKILL)
        if len(self._received_signals) > 1 or now > self._deadline:
            self._signal(signal.SIGKILL)

    def _check_heartbeats(self, now: float, ranked: list[Member]) -> None:
        """Ping all processes; end those that do not reply, or do not request a place in time for a new generation."""
        if now - self._pinged >= _PING_SECONDS:
            self._pinged = now
            for member in list(self.members.values()):
                silent = (member.sent - member.answered) * _PING_SECONDS
                if silent >= self.settings.pulse:
                    self._give_up(member, f"sent no heartbeat for {silent:.0f} s")
                elif self.control_server.send(member.number, Ping()) or member.sent:
                    member.sent += 1  # count also if its socket is broken, as only this limit ends it then
                elif member.state == STARTING and now - member.began > self.settings.timeout:
                    self._give_up(member, f"did not reach hvd.init within {self.settings.timeout:g} s")
        if any(member.state == READY for member in ranked):
            # The time counts from the first rank that waits for the new generation.
            self._reset_since = self._reset_since or now
            for member in ranked:
                limit = self._start_timeout if member.suspect else self.settings.timeout
                if member.state == IN and now - self._reset_since > limit:
                    self._give_up(member, f"did not join the new generation within {limit:g} s")

    def _give_up(self, member: Member, event: str) -> None:
        """End a process that hangs, and continue as if it had died."""
        if member.state == LEAVING:
            return
        self._report_failure(member, f"{event} and is ended")
        had_rank, member.state = member.rank >= 0, LEAVING
        # On another host the child is the agent's client: after SIGTERM the agent ends the rank there.
        member.until = time.monotonic() + (self.grace + 3.0 if member.machine else 0.0)
        self.pump.children[member.number].send_signal(signal.SIGTERM if member.machine else signal.SIGKILL)
        if had_rank:
            self.failures.append(ExitStatus(-1, "SIGKILL", 137, 0))
            reason = f"{self._name(member)} {event}"
            member.rank = -1
            self._break_generation(reason)

    def _update_generation(self, slots: Slots, ranked: list[Member], now: float) -> None:
        """Form a new generation if all its processes wait; announce changes to a running generation."""
        ranked = [member for member in ranked if member.state != LEAVING]
        leaving = [] if self.finishing else [m for m in surplus(slots, self._staying()) if m.rank >= 0]
        new = [member for member in self._staying() if member.state == READY and member.rank < 0]
        starting = [member for member in self.members.values() if member.state == STARTING]
        if self.running and not any(member.state == READY for member in ranked):
            soon = any(now - member.began < self._start_timeout for member in starting)  # one reset for all costs less
            if not self.finishing and not soon and (new or leaving):
                self._announce(bool(new) or len(leaving) == len(ranked))
            return
        waits_for_first = not self.generation and starting and not self.failures
        if not waits_for_first and not any(member.state == IN for member in ranked):
            self._form(slots, ranked, leaving, new, now)

    def _form(self, slots: Slots, ranked: list[Member], leaving: list[Member], new: list[Member], now: float) -> None:
        """Begin a new generation if there are enough processes.

        Args:
            slots: the hosts that the job may use now.
            ranked: the processes of the last generation, which all wait for a place.
            leaving: those of them that have no slot any more.
            new: the processes that join.
            now: the time, in monotonic seconds.
        """
        stay = [member for member in ranked if member not in leaving]
        if self.finishing:
            new = []
        if new and not stay:  # if all leave, keep them for one generation, to give the state to the new processes
            stay, leaving = leaving, []
        least = self.settings.least if self.generation or self.failures else self.settings.first
        if len(stay) + len(new) < (1 if self.finishing else least):
            self._wait_for_more(slots, len(stay) + len(new), least, now)
            return
        if not self.generation and any(member.state == STARTING for member in self.members.values()):
            return  # the first generation waits for all processes that have started and live
        for member in leaving:
            self._end_member(member, now, _LEAVE_SECONDS)
        self._begin([*ordered(stay), *ordered(new)])

    def _announce(self, joining: bool) -> None:
        """Send the ranks a message that makes them end this generation at their next commit."""
        number, before = self._announced
        if not number or (joining and not before):
            self._announced = (number + 1, joining)
            self._send_all(RanksChange(self.generation, joining))

    def _begin(self, members: list[Member]) -> None:
        limit = self.settings.resets
        if self.generation:
            self.resets += 1
            if limit is not None and self.resets > limit:
                self._stop(self._failure_code(), f"its ranks have changed more often than --reset-limit {limit} allows")
                return
        sync = any(member.rank < 0 or member.sync for member in members)
        self.generation += 1
        self.running, self._announced, self._shortage_since, self._reset_since = True, (0, False), 0.0, 0.0
        self._shared_texts, self.failures = {}, []
        hosts = list(dict.fromkeys(other.machine or "localhost" for other in members))
        for member, place in zip(members, places(members), strict=True):
            member.rank, member.state, member.suspect = place["rank"], IN, False
            assignment = AssignRank(self.generation, sync, self.settings.here, hosts, **place)
            self.control_server.send(member.number, assignment)
        if self.generation > 1:
            listing = ", ".join(f"rank {place}: process {m.number}" for place, m in enumerate(members[:16]))
            more = f" and {len(members) - 16} more" if len(members) > 16 else ""
            self.output.say(f"choros run: generation {self.generation}, size {len(members)} ({listing}{more})")

    def _wait_for_more(self, slots: Slots, count: int, least: int, now: float) -> None:
        """Wait for more processes; end the job if too few can start, or after ``--elastic-timeout``."""
        self._shortage_since = self._shortage_since or now
        waited = now - self._shortage_since
        shortage = f"{count} of the {least} ranks that it needs are ready"
        if not self.settings.script:
            # With a script the hosts may change, so only a fixed list can be too short for good.
            possible = vacancies(slots, self._staying(), self.blacklist.barred(ever=True), self.settings.most)
            if len(self._staying()) + len(possible) < least:
                self._stop(self._failure_code(), f"{shortage}; its hosts have no slot left{self._barred_text()}")
                return
        if waited > self.settings.timeout:
            known = ", ".join(f"{host}:{n}" for host, n in slots) or "none"
            more = f"; the host discovery script {self.discovery.problem}" if self.discovery.problem else ""
            self._stop(
                self._failure_code(),
                f"for {waited:.0f} s (--elastic-timeout) {shortage}; hosts: {known}{self._barred_text()}{more}",
            )

    def _failure_code(self) -> int:
        return self.failures[0].code if self.failures else 1

    def _barred_text(self) -> str:
        barred = sorted(self.blacklist.barred())
        return f"; excluded after failures: {', '.join(barred)}" if barred else ""

    def _stop(self, code: int, why: str) -> None:
        """End the job with an exit code and a reason."""
        if self._exit_code is None:
            self._exit_code = code
            if why:
                self.output.say(f"choros run: the job ends with code {code}, as {why}")
            self._finish(signal.SIGTERM if not self._received_signals else self._received_signals[0])


def start_elastic(
    command: Sequence[str],
    options: LaunchOptions,
    settings: ElasticSettings,
    *,
    ssh: str,
    network: str = "",
    verbose: bool = False,
) -> JobResult:
    """Run a command as the ranks of an elastic job; see ``choros.launch.local_job.start``.

    Args:
        command: the program and its arguments.
        options: the options of the launch.
        settings: the elastic settings.
        ssh: the program that starts a command on a host, and its options.
        network: the interface or domain by which the hosts reach each other. Defaults to "".
        verbose: print the cores, threads and command of each process. Defaults to False.

    Returns:
        The outcome of the job.

    Raises:
        InvalidInputError: the options cannot be satisfied, or a process cannot be started.
    """
    from choros.cluster.hardware.network_address import LOOPBACK, head_address
    from choros.comm.tcp.auth_socket import AuthListener

    local = sum(count for host, count in settings.hosts if is_this_machine(host))
    check_ranks(min(local, settings.most or local))
    secret = secrets.token_bytes(32)
    address = LOOPBACK if settings.here else head_address(network, here=True)
    output = Output(0, options.folder, options.timestamps, total=settings.most or settings.first)
    report = output.say if verbose else (lambda _: None)
    starter = ProcessStarter(command, options, secret, ssh, network, report)
    driver = Driver(
        starter,
        settings,
        options,
        output,
        lambda on_message: ControlServer(AuthListener(address, secret, ProcessGreeting), on_message),
    )
    with driver.signals():
        try:
            return driver.watch()
        finally:
            driver.end()
            sys.stdout.flush()
