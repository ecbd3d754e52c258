"""The hosts that an elastic job may use now, from a script that runs about once a second, or from a fixed list."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from choros.cluster import Slots
from choros.errors import InvalidInputError

_LINE = re.compile(r"([\w.-]+)(?:\s*:\s*(\d{1,6}))?", re.ASCII)
_INTERVAL = 1.0  # seconds between two runs of the script
LIMIT = 30.0  # seconds that one run may take


def parse_found(text: str, each: int = 1) -> Slots:
    r"""Return the hosts that a discovery script printed, one line ``host`` or ``host:slots`` for each.

    Args:
        text: the output of the script; empty lines are ignored.
        each: slots of a host whose line has no number. Defaults to 1.

    Returns:
        Each host and its slots, in the order printed, without hosts of 0 slots.

    Raises:
        InvalidInputError: a line has another form, or a host appears twice.

    Example:
        >>> parse_found("n1:4\n\nn2\n", each=2)
        (('n1', 4), ('n2', 2))
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InvalidInputError(f"line {number} is {line.strip()[:80]!r}, not of the form host or host:slots")
        if match[1] in slots:
            raise InvalidInputError(f"line {number} names {match[1]} a second time")
        slots[match[1]] = each if match[2] is None else int(match[2])
    return tuple((host, count) for host, count in slots.items() if count)


def script_of(text: str) -> list[str]:
    """Return the words of ``--host-discovery-script``, with the absolute path of the program.

    Args:
        text: a program and its arguments, in shell syntax.

    Raises:
        InvalidInputError: the program does not exist or is not executable, or ``text`` cannot be split.

    Example:
        >>> script_of("echo localhost:2")[1:]
        ['localhost:2']
    """
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError(f"--host-discovery-script {text!r} cannot be read: {error}") from None
    program = shutil.which(command[0]) if command else None
    if program is None:
        exists = bool(command) and os.path.exists(command[0])
        problem = "may not be run: chmod +x it" if exists else "is not there"
        raise InvalidInputError(f"--host-discovery-script {text!r}: the program {problem}")
    return [os.path.abspath(program), *command[1:]]


class Discovery:
    """Thread that runs a script about once a second, and keeps the hosts of the last successful run.

    Args:
        script: list of str. Program and arguments; empty if the hosts are fixed.
        fixed: Slots. The fixed hosts.
        each: int. Slots of a host whose line has no number. Defaults to 1.
        changed: function called in the thread when the hosts have changed.
        report: function that prints a line when the script fails, hangs, or works again.
        limit: float. Seconds that one run may take. Defaults to 30.

    Attributes:
        slots: Slots. The present hosts; None before the first successful run. problem: str. The last error, or "".

    Example:
        >>> Discovery([], (("localhost", 2),)).slots
        (('localhost', 2),)
    """

    def __init__(
        self,
        script: list[str],
        fixed: Slots = (),
        each: int = 1,
        *,
        changed: Callable[[], object] = lambda: None,
        report: Callable[[str], object] = print,
        limit: float = LIMIT,
    ) -> None:
        self.script, self.slots, self.problem = script, None if script else fixed, ""
        self._each, self._changed, self._report, self._limit = each, changed, report, limit
        self._closing = threading.Event()
        self._running: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run_repeatedly, name="choros-discovery", daemon=True)
        if script:
            self._thread.start()

    def close(self) -> None:
        """End the thread, and kill the script if it runs."""
        self._closing.set()
        self._kill_script()
        if self.script:
            self._thread.join(5.0)

    def _run_repeatedly(self) -> None:
        while not self._closing.is_set():
            try:
                slots, problem = parse_found(self._run_script(), self._each), ""
            except (InvalidInputError, OSError, subprocess.TimeoutExpired) as error:
                slots, problem = self.slots or (), self._problem_text(error)
            if self._closing.is_set():
                # ``close`` has killed the script. That is not an error of the script.
                return
            if problem != self.problem:
                consequence = "the hosts that it named last are kept" if self.slots else "no hosts are known yet"
                text = (
                    f"the host discovery script {problem}; {consequence}"
                    if problem
                    else "the host discovery script works"
                )
                self._report(f"choros run: {text}")
                self.problem = problem
            if not problem and slots != self.slots:
                self.slots = slots
                self._changed()
            self._closing.wait(_INTERVAL)

    def _problem_text(self, error: Exception) -> str:
        if isinstance(error, subprocess.TimeoutExpired):
            return f"did not end within {self._limit:g} s and was ended"
        if isinstance(error, OSError):
            return f"cannot be started: {error.strerror}"
        return str(error) if str(error).startswith("failed") else f"printed what cannot be read: {error}"

    def _run_script(self) -> str:
        with subprocess.Popen(
            self.script,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a process group, so that ``_kill_script`` also kills the script's children
        ) as process:
            self._running = process
            try:
                out, errors = process.communicate(timeout=self._limit)
            # ``communicate`` kills nothing at its timeout.
            except BaseException:
                self._kill_script()
                raise
            finally:
                self._running = None
        if process.returncode:
            last = f": {errors.strip().splitlines()[-1][:200]}" if errors.strip() else ""
            raise InvalidInputError(f"failed with code {process.returncode}{last}")
        return out

    def _kill_script(self) -> None:
        process = self._running
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
