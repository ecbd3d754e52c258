"""A real SLURM of four nodes on this machine, for as long as the tests run.

Each node is a ``slurmd`` with a host name, a list of hosts and a port of its own (namespaces of names and of mounts).
There is no systemd, no control group, no data base, and nothing in /etc: all files lie in one folder, which goes with
what is in it. The nodes are said to have two GPUs, which are devices of memory.
"""

import contextlib
import os
import pathlib
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

NODES, CORES, GPUS = 4, 2, 2
SOURCE = pathlib.Path(__file__).parents[2] / "src"

SETTINGS = """
ClusterName=choros
SlurmctldHost={here}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={room}/munge/socket,cred_expire=15
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={port}
StateSaveLocation={room}/state
SlurmdSpoolDir={room}/spool-%n
TmpFS={room}/tmp-%n
SlurmctldPidFile={room}/slurmctld.pid
SlurmdPidFile={room}/slurmd-%n.pid
SlurmctldLogFile={room}/slurmctld.log
SlurmdLogFile={room}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=3
MessageTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


class Slurm:
    """The cluster, and how commands are run on its head."""

    def __init__(self):
        self.room = pathlib.Path(tempfile.mkdtemp(prefix="choros-slurm-"))
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]  # tests/startup is in it
        self.environment = {"SLURM_CONF": str(self.room / "slurm.conf"), "PYTHONPATH": os.pathsep.join(paths)}

    def up(self):
        room = self.room
        room.chmod(0o755)
        for name in ("munge", "state", *(f"{kind}-n{i}" for i in self.numbers for kind in ("spool", "tmp"))):
            (room / name).mkdir()
        key = room / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = [f"127.0.0.1 localhost {platform.node()}", *(f"127.0.1.{i} n{i}" for i in self.numbers)]
        (room / "hosts").write_text("\n".join(hosts) + "\n")
        ports = free_ports(NODES + 1)
        lines = [SETTINGS.format(room=room, here=platform.node().partition(".")[0], port=ports[0])]
        lines += [
            f"NodeName=n{i} NodeHostname=n{i} NodeAddr=127.0.1.{i} Port={port} CPUs={CORES} RealMemory=2000 "
            f"Gres=gpu:{GPUS} State=UNKNOWN"
            for i, port in zip(self.numbers, ports[1:], strict=True)
        ]
        (room / "slurm.conf").write_text("\n".join(lines) + "\n")
        (room / "cgroup.conf").write_text("CgroupPlugin=autodetect\nIgnoreSystemd=yes\n")
        for i in range(GPUS):
            os.mknod(room / f"gpu{i}", 0o600 | 0o020000, os.makedev(1, 3 + 2 * i))  # null and zero
        (room / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu File={room}/gpu[0-{GPUS - 1}]\n")
        files = ["key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed"]
        options = [f"--{name}={room}/munge/{file}" for name, file in (pair.split("=") for pair in files)]
        self.run("munged", *options, "--force")
        self.run("slurmctld", "-c", "-f", room / "slurm.conf")
        # A slurmd that finds no controller tries again after 1, 2, 4 ... s.
        self.wait(lambda: "is UP" in self.run("scontrol", "ping", check=False), 120)
        for i in self.numbers:
            node = f"mount --bind {room}/hosts /etc/hosts && hostname n{i} && exec slurmd -N n{i} -f {room}/slurm.conf"
            self.run("unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", node)
        self.wait(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(NODES), 120)

    @property
    def numbers(self):
        return range(1, NODES + 1)

    def down(self):
        """End what ``up`` started, by the numbers that the daemons wrote down, and remove the folder."""
        if (self.room / "slurmctld.pid").exists():
            self.run("scancel", "--user=root", check=False)
            self.wait(lambda: not self.run("squeue", "-h", check=False).strip(), fail=False)
        files = [*self.room.glob("*.pid"), self.room / "munge" / "pid"]
        started = [int(file.read_text()) for file in files if file.exists()]
        for number in started:
            subprocess.run(["kill", str(number)], stderr=subprocess.DEVNULL)
        self.wait(lambda: not any(pathlib.Path(f"/proc/{number}").exists() for number in started), 60)
        shutil.rmtree(self.room)

    def run(self, *command, check=True, timeout=180, cwd=None, stdin="", **environment):
        """Run a command to its end; return what it printed."""
        with tempfile.TemporaryFile("w+") as out:  # a daemon keeps a pipe open
            done = subprocess.run(
                list(map(str, command)),
                stdout=out,
                stderr=subprocess.STDOUT,
                input=stdin,
                text=True,
                timeout=timeout,
                cwd=cwd,
                env={**os.environ, **self.environment, **environment},
            )
            out.seek(0)
            output = out.read()
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{output}{self.logs()}"
        self.code = done.returncode
        return output

    def choros(self, *arguments, **how):
        """Run a command of choros."""
        return self.run(sys.executable, "-m", "choros", *arguments, **how)

    def state(self, job):
        output = self.run("scontrol", "show", "job", "--oneliner", job)
        return re.search(r"JobState=(\w+)", output)[1]

    def until(self, job, *states, within=60):
        self.wait(lambda: self.state(job) in states, within)
        return self.state(job)

    def logs(self):
        names = ("slurmctld.log", "slurmd-n1.log")
        return "".join(f"--- {n}\n{(self.room / n).read_text()[-1500:]}" for n in names if (self.room / n).exists())

    def wait(self, true, within=20, fail=True):
        end = time.monotonic() + within
        while not true():
            if time.monotonic() > end:
                assert not fail, f"it did not come about in {within} s\n{self.logs()}"
                return
            time.sleep(0.1)


def free_ports(count):
    """Return ports on which nobody listens now, below those that the kernel gives to other programs."""
    numbers = []
    for number in random.sample(range(10_000, 19_000), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", number))
            numbers.append(number)
    return numbers[:count]


@pytest.fixture(scope="session")
def slurm():
    """The cluster. What is missing is an error: these tests run where they were asked for."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged", "unshare") if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} is not here: .ci/run installs it"
    shared = set(pathlib.Path("/dev/shm").iterdir())
    cluster = Slurm()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        for remaining in set(pathlib.Path("/dev/shm").glob("mpich_shm_*")) - shared:  # of jobs that were aborted
            remaining.unlink(missing_ok=True)
