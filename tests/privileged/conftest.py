"""Fixtures for several machines: network namespaces of this one represent them, and a script replaces ssh."""

import os
import platform
import subprocess

import pytest

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts --ipc --pid --mount-proc --fork --kill-child sh -c "hostname $host; $*"
"""
APART = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec {prefix}-$host unshare --uts --ipc --pid --mount --mount-proc --fork --kill-child sh -c \
    "hostname $host; mount --bind {room}/hosts /etc/hosts; mount --bind {room}/nsswitch /etc/nsswitch.conf; $*"
"""


@pytest.fixture
def ssh(tmp_path):
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return path


class Network:
    """Machines one, two and three with a network of their own, by which also the head reaches them; eth0 on each.

    Attributes:
        head: the command before one that is to run where the others are reached. address: the head's.
        ssh: what stands in for ssh there.
    """

    names = ("one", "two", "three")

    def __init__(self, room):
        self.prefix, self.ssh, self.address = f"choros-{os.getpid()}", room / "ssh", "10.79.7.254"
        self.head = ["ip", "netns", "exec", f"{self.prefix}-head"]
        facts = [f"127.0.0.1 localhost\n{self.address} {platform.node()}"]
        facts += [f"10.79.7.{i} {name}" for i, name in enumerate(self.names, 1)]
        (room / "hosts").write_text("\n".join(facts) + "\n")
        (room / "nsswitch").write_text("hosts: files\n")
        self.ssh.write_text(APART.format(prefix=self.prefix, room=room))
        self.ssh.chmod(0o755)

    def up(self):
        self._ip("netns add {0}-head", "-n {0}-head link set lo up", "-n {0}-head link add switch type bridge")
        self._ip(f"-n {{0}}-head addr add {self.address}/24 dev switch", "-n {0}-head link set switch up")
        for i, name in enumerate(self.names, 1):
            text = f"-n {{0}}-{name}"
            self._ip(
                f"netns add {{0}}-{name}", f"link add to{i} netns {{0}}-head type veth peer eth0 netns {{0}}-{name}"
            )
            self._ip(f"-n {{0}}-head link set to{i} master switch up", f"{text} addr add 10.79.7.{i}/24 dev eth0")
            self._ip(f"{text} link set eth0 up", f"{text} link set lo up")

    def down(self):
        for name in (*self.names, "head"):
            subprocess.run(["ip", "netns", "del", f"{self.prefix}-{name}"], stderr=subprocess.DEVNULL, check=False)

    def _ip(self, *commands):
        for command in commands:
            subprocess.run(["ip", *command.format(self.prefix).split()], check=True)


@pytest.fixture
def network(tmp_path):
    made = Network(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.down()
