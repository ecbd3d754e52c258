"""The launcher for Ray without a cluster: its arguments, its messages, files on nodes, and the program beside ssh.

Tests on a cluster are in tests/ray_cluster.
"""

import json
import os
import pathlib
import re
import socket
import stat
import subprocess
import sys

import pytest

import choros
from choros.errors import InvalidInputError, MissingPackageError
from choros.launch.private_file import digest_of
from choros.launch.ray_cluster.holder import GPU_VARIABLES, RankHolder
from choros.launch.ray_cluster.node_files import NodeFiles
from choros.launch.ray_cluster.reservation import gpu_variables
from choros.launch.specs import launcher_of
from choros.training.payload import SharedCodeFolder, read_code

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cores": 0}, "cores=0: give a whole number, 1 or more."),
        ({"gpus": -1}, "gpus=-1: give a whole number, 0 or more."),
        ({"gpus": 0.5}, "gpus=0.5: give a whole number, 0 or more."),
        ({"timeout": 0}, "timeout=0: give a number of seconds above 0."),
        ({"timeout": float("inf")}, "timeout=inf: give a number of seconds above 0."),
        ({"strategy": "spraed"}, "strategy='spraed': did you mean SPREAD?."),
        ({"strategy": "x"}, "strategy='x': give one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD."),
        ({"address": 3}, "address=3: give host:port, such as 'head:6379'."),
        ({"address": "ray://head:10001"}, "run it on a node of the cluster, for example by `ray job submit`."),
    ],
    ids=str,
)
def test_arguments_are_checked_when_the_launcher_is_made(how, message):
    with pytest.raises(InvalidInputError, match=re.escape(message.replace("?.", "?"))):
        choros.Ray(**how)


def test_its_text_has_its_arguments():
    assert repr(choros.Ray()) == "Ray(cores=1, gpus=0, strategy='PACK')"
    made = choros.Ray(4, 1, address="head:6379", strategy="SPREAD", timeout=9)
    assert repr(made) == "Ray(cores=4, gpus=1, address='head:6379', strategy='SPREAD', timeout=9.0)"
    assert repr(launcher_of("ray")) == repr(choros.Ray())
    with pytest.raises(InvalidInputError, match="choros.Ray()"):
        launcher_of("rai")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=re.escape("ray is not installed: pip install 'choros[ray,jax]'")):
        choros.Ray().size()


def test_the_gpus_of_a_node_are_those_of_its_workers():
    assert gpu_variables([]) == dict.fromkeys(GPU_VARIABLES, "")
    two = [{"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": ""}, {"HIP_VISIBLE_DEVICES": "0,2"}]
    assert gpu_variables(two) == {"HIP_VISIBLE_DEVICES": "3,1,0,2"}
    both = [{"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": str(number)} for number in (0, 1)]
    assert gpu_variables(both) == {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}


def test_files_are_written_where_they_do_not_exist_and_only_those_are_removed(tmp_path):
    """A node that does not have the caller's directory, and one that shares it."""
    with SharedCodeFolder([b"one", b"two"]) as folder:
        contents = {path: pathlib.Path(path).read_bytes() for path in folder.paths}
        sharing = NodeFiles()
        assert sharing.missing(os.getcwd(), folder.paths) == []
        sharing.write(contents)
        sharing.remove()
        assert read_code(folder.files) == [b"one", b"two"]

    directory = tmp_path / "home" / "project"
    code = directory / ".choros-1"
    files = {str(code / str(number)): content for number, content in enumerate(contents.values())}
    other = NodeFiles()
    assert other.missing(str(directory), list(files)) == [0, 1]
    assert directory.is_dir()
    other.write(files)
    assert stat.S_IMODE(code.stat().st_mode) == stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in code.iterdir()] == [0o600, 0o600]
    assert read_code({"folder": str(code), "digests": list(map(digest_of, contents.values()))}) == [b"one", b"two"]
    (directory / "result").touch()  # of a rank
    other.remove()
    assert list(directory.iterdir()) == [directory / "result"]
    assert other.missing(str(directory), []) == []
    other.remove()
    assert directory.is_dir()


def test_a_holder_runs_a_command_with_pipes():
    """Its methods are called by Ray in a cluster; stdin that is closed ends the command."""
    holder = RankHolder()
    holder.start("sh -c 'read line; echo $line; echo $SOME >&2; cat; exit 7'", {"SOME": "word"})
    holder.write(b"a line\n")
    holder.write(b"")
    out, err, code = b"", b"", None
    while code is None:
        more_out, more_err, code = holder.read()
        out, err = out + more_out, err + more_err
    assert (out, err, code) == (b"a line\n", b"word\n", 7)
    holder.write(b"ignored")


def test_a_command_that_does_not_exist_has_the_code_of_a_shell():
    holder = RankHolder()
    holder.start("/no/such/python -m choros", {})
    code = None
    while code is None:
        code = holder.read()[2]
    assert code == 127


def test_a_command_ends_with_the_process_that_started_it():
    script = """
from choros.launch.ray_cluster.holder import RankHolder
import os
holder = RankHolder()
holder.start("sh -c 'echo $$; exec sleep 60'", {})
print(int(holder.read()[0]), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    limit = 200
    while pathlib.Path(f"/proc/{int(done.stdout)}/cmdline").exists() and limit:
        if b"sleep" not in pathlib.Path(f"/proc/{int(done.stdout)}/cmdline").read_bytes():
            break  # it has ended, and is not reaped
        limit -= 1
        subprocess.run(["sleep", "0.05"], check=True)
    assert limit


def test_the_program_beside_ssh_gives_its_pipes_to_the_caller_and_returns_the_code(tmp_path):
    path = str(tmp_path / "shell")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, "-m", "choros.launch.ray_cluster.node_shell", path, "node", "a command"]
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        for code in (b"5", b""):
            with subprocess.Popen(command, **how) as program:
                connection, _ = listener.accept()
                with connection:
                    request, pipes, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                    assert json.loads(request) == {"node": "node", "command": "a command"}
                    program.send_signal(15)  # the ranks' last lines still pass through it
                    os.write(pipes[1], b"out")
                    connection.sendall(code)
                    for pipe in pipes:
                        os.close(pipe)
                out, err = program.communicate(timeout=30)
            assert (out, program.returncode) == ("out", int(code or 1))
            assert ("has ended" in err) == (not code)
