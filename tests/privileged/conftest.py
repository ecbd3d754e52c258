"""What tests of several machines share: namespaces of this one stand for them, and a script stands in for ssh."""

import pytest

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts --ipc --pid --mount-proc --fork --kill-child sh -c "hostname $host; $*"
"""


@pytest.fixture
def ssh(tmp_path):
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return path
