"""Drills of jobs: two ranks of ``choros run --restarts``, which meet over sockets through a proxy that cuts and delays.

    python drills/jobs.py --backend torch --number 20 --seed 1

Each drill draws an algorithm, a rank, a moment and a way to fail ("server" kills that of the center, once to three
times). Then must hold: the job ends in time, started again where the harm calls for it, and then goes on from a
checkpoint; all ranks end with the same weights, those that train together with the bits of a job that nothing happened
to, those that train alone with each step in the center once; no process, connection or shared memory is left, and no
descriptor here. Prints JSON; ends with 1 where one went wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxy import Proxy
from run import ASYNCHRONOUS, EPOCHS, RATE, ROWS, SYNCHRONOUS, WORKERS, parser_of, report

BATCHES = 24  # as in job.py
WAYS = ("kill", "stop", "raise", "cut", "delay", "full", "server")
LIMIT, RESTARTS, SMALL = 180.0, 2, 512  # seconds; starts again; bytes that a file may have where the disk is full


class Job:
    """One job, its output read as it comes; ``harm`` is done at a moment."""

    def __init__(self, name: str, room: Path, proxy: Proxy, worker: int, kills: Sequence[float]) -> None:
        self.kills, self.room, self.proxy, self.worker, self.mark = kills, room, proxy, worker, secrets.token_hex(8)
        command = [sys.executable, "-m", "choros", "run", "-n", str(WORKERS), "--restarts", str(RESTARTS)]
        script = [str(Path(__file__).with_name("job.py")), name, str(room), str(worker)]
        meeting = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), "CHOROS_COORDINATOR": "127.0.0.1"}
        self.process = subprocess.Popen(
            [*command, "--threads", "1", *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **meeting, "DRILL_PROXY": str(proxy.port), "DRILL": self.mark},
        )
        self.harmed = self.back = None
        self.output: list[str] = []

    def follow(self, how: str, moment: tuple[int, int, float] | None) -> int:
        """Read to the end, do harm at the moment; return the exit code."""
        watch = threading.Timer(LIMIT, lambda: os.killpg(self.process.pid, signal.SIGKILL))
        watch.start()
        furthest = (-1, -1)
        for line in self.process.stdout or ():
            self.output.append(line)
            match = re.search(r"batch (\d+) (\d+)\s*$", line)
            if not match:
                continue
            epoch, batch = int(match[1]), int(match[2])
            if moment is not None and self.harmed is None and (epoch, batch) >= moment[:2]:
                time.sleep(moment[2])
                self.harmed = time.monotonic()
                self.harm(how)
            elif self.restarts and self.harmed is not None and self.back is None and (epoch, batch) > furthest:
                self.back = time.monotonic() - self.harmed
            furthest = max(furthest, (epoch, batch))
        code = self.process.wait()
        watch.cancel()
        return code

    @property
    def restarts(self) -> int:
        """Return the number of restarts of the job."""
        return sum("started again" in line for line in self.output)

    @property
    def servers(self) -> int:
        """Return the number of restarts of the center's servers."""
        return sum("continues with the same center, restart" in line for line in self.output)

    def harm(self, how: str) -> None:
        """Do the job harm."""
        if how == "server":
            threading.Thread(target=self.kill_servers).start()
            return
        pid = int((self.room / f"pid-{0 if how == 'full' else self.worker}").read_text())
        if how == "raise":
            (self.room / "flag").touch()
        elif how == "cut":
            self.proxy.cut()
        elif how == "delay":
            self.proxy.delay(0.05, 2.0)
        else:
            with contextlib.suppress(ProcessLookupError):  # it was done
                if how == "full":  # rank 0 writes the states; new processes have room again
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL, SMALL))
                else:
                    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def kill_servers(self) -> None:
        """Kill the server of the center, and the next ones, some of which have not begun to serve."""
        done = set[str]()
        for pause in self.kills:
            time.sleep(pause)
            while self.process.poll() is None:
                fresh = [pid for pid in self.left() if pid not in done and serves(pid)]
                if fresh:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(fresh[0]), signal.SIGKILL)
                    done.add(fresh[0])
                    break
                time.sleep(0.01)

    def left(self) -> list[str]:
        """The processes of this job that are still there."""
        problems = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"DRILL={self.mark}".encode() in (entry / "environ").read_bytes():
                    problems.append(entry.name)
        return problems


def serves(pid: str) -> bool:
    """Return whether a process is a server of the center."""
    try:
        return b"choros.training.async_control.shard_server" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def wrong(name: str, how: str, job: Job, code: int, uninterrupted: str) -> list[str]:
    """Return the faults of a job."""
    restarts = job.restarts
    problems = [] if code == 0 else [f"it ended with {code}: {''.join(job.output[-12:])}"]
    fatal = how not in ("delay", "server") and job.harmed is not None
    if restarts > int(fatal) or (fatal and not restarts and name in SYNCHRONOUS):
        problems.append(f"{restarts} restarts after: {how}")
    ends = [json.loads(path.read_text()) for path in sorted(job.room.glob("end-*"))]
    if len(ends) != WORKERS or len({end["digest"] for end in ends}) != 1:
        return [*problems, f"the ranks ended with {ends}"]
    if name in SYNCHRONOUS and uninterrupted and ends[0]["digest"] != uninterrupted:
        problems.append("the weights are not those of a job without a failure")
    steps = EPOCHS * BATCHES
    if name == "DOWNPOUR" and ends[0]["weight"] != -RATE * WORKERS * steps:
        problems.append(f"the center holds {-ends[0]['weight'] / RATE:g} steps, not {WORKERS * steps}")
    rows = ends[0]["rows"]  # since it went on
    if name in ASYNCHRONOUS and (rows > steps * ROWS if restarts else rows != steps * ROWS):
        problems.append(f"{rows} rows, not {steps * ROWS}")
    if restarts and how == "full" and not any("CheckpointError" in line for line in job.output):
        problems.append("CheckpointError was not told")
    return problems


def run(
    name: str,
    how: str,
    worker: int,
    moment: tuple[int, int, float] | None,
    uninterrupted: str,
    kills: Sequence[float] = (),
) -> dict[str, Any]:
    """One job: what came of it, and what was wrong."""
    before, begun, proxy = len(os.listdir("/proc/self/fd")), time.monotonic(), Proxy()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(name, Path(folder), proxy, worker, kills)
        code = job.follow(how, moment)
        problems = wrong(name, how, job, code, uninterrupted)
        ends = [json.loads(path.read_text())["digest"] for path in Path(folder).glob("end-*")]
    if job.process.stdout is not None:
        job.process.stdout.close()
    until = time.monotonic() + 10.0
    while (remaining := [*job.left(), *(["a connection"] * proxy.open)]) and time.monotonic() < until:
        time.sleep(0.05)
    proxy.close()
    problems += [f"left behind: {remaining}"] if remaining else []
    problems += [f"in shared memory: {name}" for name in os.listdir("/dev/shm") if "choros" in name]
    while (now := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < until:
        time.sleep(0.05)
    problems += [f"{now - before} descriptors more than before"] if now > before else []
    facts = {"restarts": job.restarts, "servers": job.servers, "recovered": job.back, "wrong": problems}
    return {**facts, "seconds": time.monotonic() - begun, "digest": ends[0] if ends else ""}


def drill(number: int, seed: int, wholes: dict[str, str], ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """One drill, drawn from the seed; ``wholes`` keeps the bits of jobs that nothing happened to."""
    rng = random.Random(f"job/{seed}/{number}")
    name, how = rng.choice([*SYNCHRONOUS, *ASYNCHRONOUS]), rng.choice(ways)
    kills: list[float] = []  # seconds before each
    if how == "server":  # of which those that train together have none
        name, kills = rng.choice(list(ASYNCHRONOUS)), [0.0, *(rng.uniform(0.0, 2.0) for _ in range(rng.randrange(3)))]
    worker = rng.randrange(WORKERS)
    moment = (rng.randrange(EPOCHS - bool(kills)), rng.randrange(BATCHES - 4), rng.uniform(0.0, 0.05))
    if name in SYNCHRONOUS and name not in wholes:
        first = run(name, "", 0, None, "")
        if first["wrong"]:
            return {"number": number, "algorithm": name, "how": "none", **first}
        wholes[name] = first["digest"]
    facts = {"number": number, "algorithm": name, "how": how, "worker": worker, "moment": moment, "kills": kills}
    return {**facts, **run(name, how, worker, moment, wholes.get(name, ""), kills)}


def main() -> int:
    """Make the drills, and print what came of them."""
    parser = parser_of(__doc__, 20)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="the ways to fail, of which it draws")
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = options.backend
    done: list[dict[str, Any]] = []
    wholes: dict[str, str] = {}
    for number in options.only or range(options.number):
        done.append(drill(number, options.seed, wholes, options.ways))
        print(json.dumps(done[-1]), file=sys.stderr, flush=True)
    back = {
        way: sorted(result["recovered"] for result in done if result["how"] == way and result["recovered"])
        for way in WAYS
    }
    ways = {way: sum(result["how"] == way for result in done) for way in WAYS}
    recovered = {way: [statistics.median(each), each[-1]] for way, each in back.items() if each}
    servers = sum(result["servers"] for result in done)
    return report(options, done, ways=ways, servers=servers, recovered_seconds=recovered)


if __name__ == "__main__":
    sys.exit(main())
