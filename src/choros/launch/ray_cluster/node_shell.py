"""Run a command on a node of a Ray cluster: ``python -m choros.launch.ray_cluster.node_shell SOCKET NODE COMMAND``.

``choros run`` starts this program instead of ssh. It gives its stdin, stdout and stderr to the process that called
``fit``, by a socket of this machine. That process is connected to the cluster, and runs the command by an actor on the
node (``ShellServer``). So this program needs no connection to Ray, and the actors are part of the caller's Ray job.
"""

from __future__ import annotations

import json
import signal
import socket
import sys

_FAILED = 1


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; 1 if it could not be run, or if the caller has ended.

    Args:
        arguments: the path of the caller's socket, the id of the node, and the command as one text.
    """
    # ``choros run`` ends the ranks by closing stdin. Their last lines pass through this process, so it must not end
    # by a signal that the ranks get too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    path, node, command = arguments
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            request = json.dumps({"node": node, "command": command}).encode() + b"\n"
            sent = socket.send_fds(connection, [request], [0, 1, 2])
            if sent < len(request):
                connection.sendall(request[sent:])
            while data := connection.recv(64):
                answer += data
    except OSError:  # the caller has ended
        answer = b""
    if not answer:
        sys.stderr.write("choros: the process that called fit has ended\n")
    return int(answer or _FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
