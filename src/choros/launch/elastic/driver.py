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

_PING = 1.0  # seconds between two pings of a process
_LEAVE = 30.0  # seconds that a process may take to end after the message that it has no place


class Driver(RankSupervisor):
    """Supervisor that starts, watches and ends the processes of an elastic job, and forms its generations.

    Args:
        starter: ProcessStarter. Prepares the start of a process.
        terms: ElasticSettings. The settings of the job.
        wish: LaunchOptions. The options of the launch.
        output: Output. The receiver of the processes' lines.
        control_server: function that makes the ControlServer, from the function to call when a message arrives.
    """

    def __init__(
        self,
        starter: ProcessStarter,
        terms: ElasticSettings,
        wish: LaunchOptions,
        output: Output,
        control_server: Callable[[Callable[[], None]], ControlServer],
    ) -> None:
        super().__init__(wish.grace, output, on_line=self._line)
        self.terms, self.starter = terms, starter
        self.members: dict[int, Member] = {}
        self.generation, self.resets = 0, 0
        self.running = False  # whether no failure of this generation is known
        self.finishing = False  # whether a rank has ended with code 0
        self.failures: list[ExitStatus] = []  # of this generation, or before the first one
        self.black = Blacklist(terms.cooldown)
        self._patience = float((wish.variables or {}).get("HOROVOD_START_TIMEOUT", 30.0))
        self._texts: dict[int, str] = {}
        self._announced = (0, False)  # number of RanksChange messages to this generation; whether ranks join
        self._short = self._reset = 0.0  # the times since which ranks are missing, and since which a reset waits
        self._pinged = 0.0
        self._code: int | None = None  # the exit code, once the job is ending
        self.control_server = control_server(self.wake)
        self.discovery = Discovery(list(terms.script), terms.hosts, terms.each, changed=self.wake, report=output.say)

    def watch(self) -> JobResult:
        """Run the job to its end; return the outcome."""
        while self._code is None or len(self.ended) < len(self.pump.children):
            self._wait()
            self._reap()
            while not self.control_server.received.empty():
                self._receive(*self.control_server.received.get())
            if (self._asked or self._broken) and not self._forwarded:
                self._forwarded = True
                self._stop(128 + (self._asked[0] if self._asked else signal.SIGPIPE), "")
            # After all ends and messages: a decision by half of them would start processes that are not needed.
            if self._code is None:
                self._decide()
            self._kill_late()
        return JobResult(self._code, self._asked[0] if self._asked else 0)

    def end(self) -> None:
        """End host discovery, all processes and all connections."""
        self.discovery.close()
        super().end()
        self.control_server.close()

    def _line(self, number: int, kind: str, line: str) -> None:
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
        if self._code is not None or member.state == LEAVING:
            return
        if ended.code == 0:
            self.finishing = self.finishing or member.rank >= 0 or not self.generation
            return
        how, remedy = fate(ended)
        self._failed(member, how, remedy)
        # A process that fails before it joins does not affect the running ranks, so it is not a failure of the job.
        if member.rank >= 0 or not self.generation:
            self.failures.append(ended)
        if member.rank >= 0:
            self._break(f"{self._name(member)} {how}")

    def _failed(self, member: Member, how: str, remedy: str = "") -> None:
        seconds = self.black.bar(member.host)
        after = "no more" if seconds == float("inf") else f"none for {seconds:.1f} s"
        survivors = sum(other.rank >= 0 for other in self.members.values() if other is not member)
        rest = (
            f"ranks of its generation that continue: {survivors}"
            if survivors and member.rank >= 0
            else "it had no rank yet"
        )
        rest = rest if survivors or member.rank < 0 else "none of its generation is left"
        self.output.say(
            f"choros run: {self._name(member)} {how}; {rest}; new ranks on {member.host}: {after}"
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
        if isinstance(message, RequestRank) and self._code is None and member.state != LEAVING:
            member.state, member.sync = READY, message.sync
            if member.rank >= 0 and message.lost:
                self._suspect(message.missing)
                self._break(f"{self._name(member)} has lost its connection to other ranks: {message.lost[:500]}")
        elif isinstance(message, ShareText) and message.generation == self.generation and self.running:
            self._texts[number] = message.text
            among = ordered(m for m in self.members.values() if m.rank >= 0)
            if all(other.number in self._texts for other in among):
                self._send_all(SharedTexts(self.generation, [self._texts[m.number] for m in among]))

    def _suspect(self, ranks: Collection[int]) -> None:
        for member in self.members.values():
            if member.rank in ranks and member.state == IN:
                member.suspect = True

    # -- actions
    def _break(self, reason: str) -> None:
        """End this generation: send its ranks a message that aborts their waits for each other."""
        if self.running:  # several ranks report the same loss; only the first report ends the generation
            self.running, self._reset = False, time.monotonic()
            self._send_all(GenerationBroken(self.generation, reason))

    def _send_all(self, message: object) -> None:
        for member in self.members.values():
            if member.rank >= 0:
                self.control_server.send(member.number, message)

    def _decide(self) -> None:
        now = time.monotonic()
        slots = self.discovery.slots
        among = [member for member in self.members.values() if member.rank >= 0]
        if self.failures and not among and (self.generation or not self.members) and not self.finishing:
            why = "all ranks have failed" if self.generation else "no rank has reached hvd.init"
            self._stop(self.failures[0].code, why)
        elif self.finishing and not among:
            self._stop(self.failures[0].code if self.failures else 0, "")
        elif slots is not None:
            self._take_pulses(now, among)
            if not self.finishing:
                self._dismiss(surplus(slots, self._staying()), now)
                self._start(slots, now)
            self._go_on(slots, among, now)
        else:
            self._wait_for_more((), 0, self.terms.first, now)

    def _staying(self) -> list[Member]:
        return [member for member in self.members.values() if member.state != LEAVING]

    def _start(self, slots: Slots, now: float) -> None:
        gone = surplus(slots, self._staying())
        staying = [member for member in self._staying() if member not in gone]
        for host in vacancies(slots, staying, self.black.barred(), self.terms.most):
            number = len(self.pump.children)
            member = self.members[number] = self.starter.member(number, host, slots, self.members.values(), now)
            if not member.machine:
                self.output.keep(number)
            address = self.control_server.address
            command, environment, cores, fds = self.starter.prepare(member, address, self.terms.first)
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
        if len(self._asked) > 1 or now > self._deadline:
            self._signal(signal.SIGKILL)

    def _take_pulses(self, now: float, among: list[Member]) -> None:
        """Ping all processes; end those that do not reply, or do not request a place in time for a new generation."""
        if now - self._pinged >= _PING:
            self._pinged = now
            for member in list(self.members.values()):
                silent = (member.sent - member.answered) * _PING
                if silent >= self.terms.pulse:
                    self._give_up(member, f"sent no heartbeat for {silent:.0f} s")
                elif self.control_server.send(member.number, Ping()) or member.sent:
                    member.sent += 1  # count also if its socket is broken, as only this limit ends it then
                elif member.state == STARTING and now - member.began > self.terms.timeout:
                    self._give_up(member, f"did not reach hvd.init within {self.terms.timeout:g} s")
        if any(member.state == READY for member in among):
            # The time counts from the first rank that waits for the new generation.
            self._reset = self._reset or now
            for member in among:
                limit = self._patience if member.suspect else self.terms.timeout
                if member.state == IN and now - self._reset > limit:
                    self._give_up(member, f"did not join the new generation within {limit:g} s")

    def _give_up(self, member: Member, how: str) -> None:
        """End a process that hangs, and continue as if it had died."""
        if member.state == LEAVING:
            return
        self._failed(member, f"{how} and is ended")
        among, member.state = member.rank >= 0, LEAVING
        # On another host the child is the agent's client: after SIGTERM the agent ends the rank there.
        member.until = time.monotonic() + (self.grace + 3.0 if member.machine else 0.0)
        self.pump.children[member.number].send_signal(signal.SIGTERM if member.machine else signal.SIGKILL)
        if among:
            self.failures.append(ExitStatus(-1, "SIGKILL", 137, 0))
            reason = f"{self._name(member)} {how}"
            member.rank = -1
            self._break(reason)

    def _go_on(self, slots: Slots, among: list[Member], now: float) -> None:
        """Form a new generation if all its processes wait; announce changes to a running generation."""
        among = [member for member in among if member.state != LEAVING]
        leaving = [] if self.finishing else [m for m in surplus(slots, self._staying()) if m.rank >= 0]
        new = [member for member in self._staying() if member.state == READY and member.rank < 0]
        starting = [member for member in self.members.values() if member.state == STARTING]
        if self.running and not any(member.state == READY for member in among):
            soon = any(now - member.began < self._patience for member in starting)  # one reset for all costs less
            if not self.finishing and not soon and (new or leaving):
                self._announce(bool(new) or len(leaving) == len(among))
            return
        waits_for_first = not self.generation and starting and not self.failures
        if not waits_for_first and not any(member.state == IN for member in among):
            self._form(slots, among, leaving, new, now)

    def _form(self, slots: Slots, among: list[Member], leaving: list[Member], new: list[Member], now: float) -> None:
        """Begin a new generation if there are enough processes.

        Args:
            slots: the hosts that the job may use now.
            among: the processes of the last generation, which all wait for a place.
            leaving: those of them that have no slot any more.
            new: the processes that join.
            now: the time, in monotonic seconds.
        """
        stay = [member for member in among if member not in leaving]
        if self.finishing:
            new = []
        if new and not stay:  # if all leave, keep them for one generation, to give the state to the new processes
            stay, leaving = leaving, []
        least = self.terms.least if self.generation or self.failures else self.terms.first
        if len(stay) + len(new) < (1 if self.finishing else least):
            self._wait_for_more(slots, len(stay) + len(new), least, now)
            return
        if not self.generation and any(member.state == STARTING for member in self.members.values()):
            return  # the first generation waits for all processes that have started and live
        for member in leaving:
            self._end_member(member, now, _LEAVE)
        self._begin([*ordered(stay), *ordered(new)])

    def _announce(self, joining: bool) -> None:
        """Send the ranks a message that makes them end this generation at their next commit."""
        number, before = self._announced
        if not number or (joining and not before):
            self._announced = (number + 1, joining)
            self._send_all(RanksChange(self.generation, joining))

    def _begin(self, members: list[Member]) -> None:
        limit = self.terms.resets
        if self.generation:
            self.resets += 1
            if limit is not None and self.resets > limit:
                self._stop(self._last(), f"its ranks have changed more often than --reset-limit {limit} allows")
                return
        sync = any(member.rank < 0 or member.sync for member in members)
        self.generation += 1
        self.running, self._announced, self._short, self._reset = True, (0, False), 0.0, 0.0
        self._texts, self.failures = {}, []
        hosts = list(dict.fromkeys(other.machine or "localhost" for other in members))
        for member, place in zip(members, places(members), strict=True):
            member.rank, member.state, member.suspect = place["rank"], IN, False
            self.control_server.send(member.number, AssignRank(self.generation, sync, self.terms.here, hosts, **place))
        if self.generation > 1:
            among = ", ".join(f"rank {place}: process {m.number}" for place, m in enumerate(members[:16]))
            more = f" and {len(members) - 16} more" if len(members) > 16 else ""
            self.output.say(f"choros run: generation {self.generation}, size {len(members)} ({among}{more})")

    def _wait_for_more(self, slots: Slots, count: int, least: int, now: float) -> None:
        """Wait for more processes; end the job if too few can start, or after ``--elastic-timeout``."""
        self._short = self._short or now
        waited = now - self._short
        shortage = f"{count} of the {least} ranks that it needs are ready"
        if not self.terms.script:
            # With a script the hosts may change, so only a fixed list can be too short for good.
            possible = vacancies(slots, self._staying(), self.black.barred(ever=True), self.terms.most)
            if len(self._staying()) + len(possible) < least:
                self._stop(self._last(), f"{shortage}; its hosts have no slot left{self._out()}")
                return
        if waited > self.terms.timeout:
            known = ", ".join(f"{host}:{n}" for host, n in slots) or "none"
            more = f"; the host discovery script {self.discovery.problem}" if self.discovery.problem else ""
            self._stop(
                self._last(),
                f"for {waited:.0f} s (--elastic-timeout) {shortage}; hosts: {known}{self._out()}{more}",
            )

    def _last(self) -> int:
        return self.failures[0].code if self.failures else 1

    def _out(self) -> str:
        barred = sorted(self.black.barred())
        return f"; excluded after failures: {', '.join(barred)}" if barred else ""

    def _stop(self, code: int, why: str) -> None:
        """End the job with an exit code and a reason."""
        if self._code is None:
            self._code = code
            if why:
                self.output.say(f"choros run: the job ends with code {code}, as {why}")
            self._finish(signal.SIGTERM if not self._asked else self._asked[0])


def start_elastic(
    command: Sequence[str],
    wish: LaunchOptions,
    terms: ElasticSettings,
    *,
    ssh: str,
    network: str = "",
    verbose: bool = False,
) -> JobResult:
    """Run a command as the ranks of an elastic job; see ``choros.launch.local_job.start``.

    Args:
        command: the program and its arguments.
        wish: the options of the launch.
        terms: the elastic settings.
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

    local = sum(count for host, count in terms.hosts if is_this_machine(host))
    check_ranks(min(local, terms.most or local))
    secret = secrets.token_bytes(32)
    address = LOOPBACK if terms.here else head_address(network, here=True)
    output = Output(0, wish.folder, wish.timestamps, total=terms.most or terms.first)
    report = output.say if verbose else (lambda _: None)
    starter = ProcessStarter(command, wish, secret, ssh, network, report)
    driver = Driver(
        starter,
        terms,
        wish,
        output,
        lambda called: ControlServer(AuthListener(address, secret, ProcessGreeting), called),
    )
    with driver.signals():
        try:
            return driver.watch()
        finally:
            driver.end()
            sys.stdout.flush()
