"""The actor of Ray that holds the resources of one rank. The first one on a node also runs the node's agent."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from choros.cluster.hardware.gpu_builds import INTEL
from choros.cluster.hardware.gpus import DEVICE_VARIABLES, VARIABLE
from choros.launch.process import exec_stub
from choros.launch.process.exec_stub import PARENT
from choros.launch.ray_cluster.node_files import NodeFiles
from choros.launch.ssh.agent_job import OF_LAUNCHER

# Variables by which Ray shows a process its GPUs (CUDA; HIP), and a variable with which HIP's numbers begin.
GPU_VARIABLES = tuple(name for name in DEVICE_VARIABLES if name != VARIABLE[INTEL])
_MAX_OUTPUT_BYTES = 1 << 20  # bytes of output that wait for ``read``; the command waits when they are reached
_READ_SECONDS = 10.0  # seconds until ``read`` returns without output
_START_SECONDS = 60.0  # seconds that the start of a process may take
_OUTPUT_END_SECONDS = 5.0  # to wait for the end of the output, which a process of the command may still hold open
CALLS = 6  # methods that run at the same time: read, write, and the short ones


class RankHolder:
    """An actor in a bundle of a placement group. Its methods run in several threads (``CALLS``).

    It runs one command: ``start``, then ``write`` and ``read`` until the exit code is there.
    """

    def __init__(self) -> None:
        self._files = NodeFiles()
        self._changed = threading.Condition()
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._error: OSError | None = None  # the command could not be started

    def place(self) -> tuple[str, str, dict[str, str]]:
        """Return the id of the node, its host name, and the variables that show this actor its GPUs."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, os.uname().nodename, {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}

    def missing(self, directory: str, paths: Sequence[str]) -> list[int]:
        """Create the working directory; see ``NodeFiles.missing``."""
        return self._files.missing(directory, paths)

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        """Write files; see ``NodeFiles.write``."""
        self._files.write(contents)

    def remove_files(self) -> None:
        """Remove the files that were written."""
        self._files.remove()

    def start(self, command: str, variables: Mapping[str, str]) -> None:
        """Start a command, which ends with this process.

        Args:
            command: the program and its arguments, as one text for a shell.
            variables: environment variables, in addition to those of this process.

        Raises:
            OSError: the command could not be started.
        """
        # Ray may have been started on the nodes by a scheduler's launcher, whose ranks are not those of the job.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHER)}
        environ = {**inherited, **variables, PARENT: str(os.getpid())}
        started = threading.Event()
        arguments = (shlex.split(command), environ, started)
        # The kernel ends the command when the thread that started it ends, so this thread waits for the command.
        threading.Thread(target=self._run, args=arguments, name="choros-command", daemon=True).start()
        if not started.wait(_START_SECONDS):
            raise TimeoutError(f"no process could be started on {os.uname().nodename} for {_START_SECONDS:.0f} s")
        if self._error is not None:
            raise self._error

    def write(self, data: bytes) -> None:
        """Write to the command's stdin; no bytes close it."""
        pipe = self._process.stdin if self._process is not None else None
        if pipe is None or pipe.closed:
            return
        try:
            if data:
                pipe.write(data)
                pipe.flush()
            else:
                pipe.close()
        except OSError:  # the command has ended
            return

    def read(self) -> tuple[bytes, bytes, int | None]:
        """Wait for output. Return that of stdout and stderr, and the exit code once no output will follow."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._output.values()) or self._code is not None, _READ_SECONDS)
            out, err = (bytes(data) for data in self._output.values())
            for data in self._output.values():
                data.clear()
            self._changed.notify_all()
            return out, err, self._code

    def _run(self, command: Sequence[str], environ: Mapping[str, str], started: threading.Event) -> None:
        """Run the command and store its exit code as a shell gives it."""
        try:
            self._process = subprocess.Popen(
                exec_stub.with_stub(command),
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            started.set()
        with self._process as process:
            pipes = {"stdout": process.stdout, "stderr": process.stderr}
            readers = [threading.Thread(target=self._collect, args=pair, daemon=True) for pair in pipes.items()]
            for reader in readers:
                reader.start()
            code = process.wait()
            for reader in readers:
                reader.join(_OUTPUT_END_SECONDS)
            with self._changed:
                self._code = code if code >= 0 else 128 - code
                self._changed.notify_all()

    def _collect(self, name: str, pipe: IO[bytes]) -> None:
        """Store what the command writes to one pipe, for ``read``."""
        while data := os.read(pipe.fileno(), 1 << 16):
            with self._changed:
                self._changed.wait_for(lambda: len(self._output[name]) < _MAX_OUTPUT_BYTES)
                self._output[name] += data
                self._changed.notify_all()
