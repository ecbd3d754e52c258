"""Between hosts: sums by MPI and bare mpi4py's, of two hosts and flat ones, and exchanges with a far center.

Two network namespaces of this machine stand for two hosts (root is needed), joined by a pair of virtual cables that may
be slowed down. What is compared is interleaved in the same ranks. Prints JSON.

    python benchmarks/hosts.py --what mpi                     # one host: MpiGroup against MPI_Allreduce of bare mpi4py
    python benchmarks/hosts.py --what sums --rate 1gbit       # 2 hosts x 2 ranks: in each host first, against flat
    python benchmarks/hosts.py --what center                  # 2 hosts: an exchange, and one TCP stream for its bytes
    python benchmarks/hosts.py --what center --here           # the same by 2 ranks of this machine, without root
"""

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

HERE = "10.79.0.254"
HOSTS = {"choros-a": "10.79.0.1", "choros-b": "10.79.0.2"}
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec $host unshare --uts --ipc --pid --mount --mount-proc --fork --kill-child \\
    sh -c "hostname $host; mount --bind %s/hosts /etc/hosts; mount --bind %s/nsswitch /etc/nsswitch.conf; $*"
"""


def median(times):
    return statistics.median(times)


def timed(call):
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def say(rank, **facts):
    if rank == 0:
        print("RESULT " + json.dumps(facts), flush=True)


def mpi(rounds):
    """Measure a sum against MPI_Allreduce of the same bytes, in place in a separate buffer."""
    from choros.comm.p2p.mpi_group import MpiGroup

    group = MpiGroup(timeout=120)
    from mpi4py import MPI

    for count in (2_560, 1_000_000, 25_000_000):
        slot, worker_cores, out = group.slot(count, "float32"), np.ones(count, "float32"), np.empty(count, "float32")
        slot[:] = 1
        bare, ours = [], []
        for turn in range(rounds * (4 if count > 1e7 else 20) + 2):
            MPI.COMM_WORLD.Barrier()
            bare.append(timed(lambda worker_cores=worker_cores, out=out: MPI.COMM_WORLD.Allreduce(worker_cores, out)))
            group.barrier()
            ours.append(timed(lambda count=count: group.sum_slots(count, "float32")))
            if turn < 2:
                bare.clear(), ours.clear()
        ratio = median(bare) / median(ours)
        more = (median(ours) - median(bare)) * 1e6
        say(group.rank, values=count, bare_us=median(bare) * 1e6, ours_us=median(ours) * 1e6, ratio=ratio, more_us=more)


def bytes_sent():
    """Bytes that this host has sent to the other."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def sums(rounds):
    """Sums in each host first, against flat ones: time, and bytes on the wire."""
    from choros.comm.hierarchical_group import HierarchicalGroup
    from choros.comm.p2p.mpi_group import MpiGroup

    flat = MpiGroup(timeout=300)
    hosts = HierarchicalGroup(flat)
    for count in (250_000, 2_500_000):
        took, bytes_ = {"flat": [], "hosts": []}, {}
        for turn in range(rounds + 1):
            for name, group in (("flat", flat), ("hosts", hosts)):
                group.slot(count, "float32")[:] = flat.rank
                flat.barrier()
                before = bytes_sent()
                spent = timed(lambda group=group, count=count: group.sum_slots(count, "float32"))
                flat.barrier()
                bytes_[name] = bytes_sent() - before
                if turn:
                    took[name].append(spent)
        say(
            flat.rank,
            values=count,
            flat_ms=median(took["flat"]) * 1e3,
            hosts_ms=median(took["hosts"]) * 1e3,
            speedup=median(took["flat"]) / median(took["hosts"]),
            bytes_of_flat=bytes_["hosts"] / bytes_["flat"],
        )


def center(rounds):
    """One worker's exchange with a center of the other rank, by TCP and by MPI, against one stream for its bytes."""
    from choros import algorithms
    from choros.cluster.hardware.network_address import own_address
    from choros.comm.p2p.mpi_group import MpiGroup
    from choros.param_server.sharded import ShardedParameterServer

    group = MpiGroup(timeout=300)
    address = own_address(os.environ["CHOROS_NETWORK"])
    rule, none = algorithms.AEASGD(alpha=0.3), np.zeros(0, "float32")
    for count in (1_000_000, 25_000_000):
        stream = _stream(group, address)
        with ExitStack() as stack:
            lines = {way: _line(group, rule, count, way, address, stack) for way in ("tcp", "mpi")}
            if group.rank == 0:
                _echo(stream)
            else:
                far = {way: ShardedParameterServer(rule, [(slice(0, count), line)]) for way, line in lines.items()}
                local, seen = np.ones(count, "float32"), np.zeros(count, "float32")
                took = {"stream": [], "tcp": [], "mpi": []}
                for turn in range(rounds + 1):
                    for way, times in took.items():
                        exchange = partial(far[way].exchange, local, seen, 8, none) if way in far else None
                        times.append(timed(exchange or partial(_carry, stream, count * 4)))
                        if not turn:
                            times.clear()
                stream.sendall((0).to_bytes(8, "little"))
                for way, times in took.items():
                    print(f"{way} {count}: {[round(each * 1e3) for each in times]} ms", file=sys.stderr)
                ms = {f"{way}_ms": median(times) * 1e3 for way, times in took.items()}
                speed = {f"{way}_gb_per_second": 8e-9 * count / median(took[way]) for way in far}
                ratios = {f"{way}_of_stream": median(took[way]) / median(took["stream"]) for way in far}
                say(0, values=count, **ms, **speed, **ratios)
            group.barrier()
        stream.close()


def _line(group, rule, count, way, address, stack):
    """Rank 1's connection to a new center of rank 0; None on rank 0, which serves it until the stack is closed."""
    from choros import algorithms
    from choros.comm.tcp.auth_socket import RankGreeting
    from choros.comm.tcp.reconnecting_client import ReconnectingClient
    from choros.param_server.shard_service import reply_segment
    from choros.param_server.shared_memory import SharedMemoryParameterServer
    from choros.param_server.transfer_client import TransferClient
    from choros.param_server.transfer_slots import TransferSlots, VectorRelay
    from choros.training.async_control.shard_server import ServerConfig, ShardServerProcess

    messages, place = group.among(range(2)) if way == "mpi" else None, ""
    if group.rank == 0:
        nothing = np.zeros(0, "float32")
        segment = stack.enter_context(SharedMemoryParameterServer.create(np.zeros(count, "float32"), nothing, (), 2))
        shard = stack.enter_context(SharedMemoryParameterServer(segment, rule, 0, 2))
        segments = {"center": segment, "replies": stack.enter_context(reply_segment(shard))}
        if messages is not None:
            segments["transfers"] = stack.enter_context(TransferSlots.create(shard))
            slots = TransferSlots(segments["transfers"], shard)
            stack.callback(VectorRelay(slots, messages, segments["replies"], shard, [1]).close)
        descriptors = {name: each.fd for name, each in segments.items()}
        server = ShardServerProcess(
            ServerConfig(algorithms.to_config(rule), "", 2, 300.0, "ab" * 32, address, **descriptors)
        )
        stack.callback(server.close)
        place = server.address
    place = group.gather(place.encode())[0].decode()
    if group.rank == 0:
        return None
    line = ReconnectingClient(place, bytes.fromhex("ab" * 32), RankGreeting(1, "b"), "the center", 300.0, 30.0)
    stack.callback(line.close)
    return TransferClient(line, messages, 0, "a", count, "float32") if messages is not None else line


def _stream(group, address):
    """One plain TCP connection between the two."""
    if group.rank == 0:
        with socket.create_server((address, 0)) as door:
            group.gather(json.dumps(door.getsockname()).encode())
            end = door.accept()[0]
    else:
        end = socket.create_connection(tuple(json.loads(group.gather(b"")[0])))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def _busy():
    """Hold Python's lock as a script's own loop does, for up to 5 ms at a time."""
    while True:
        sum(range(1000))


def _fill(end, view):
    while view:
        view = view[end.recv_into(view) :]


def _carry(end, nbytes):
    """The bytes there, and as many back."""
    room = _room(nbytes)
    end.sendall(nbytes.to_bytes(8, "little"))
    end.sendall(room)
    _fill(end, memoryview(room))


def _echo(end):
    head = bytearray(8)
    while True:
        _fill(end, memoryview(head))
        nbytes = int.from_bytes(head, "little")
        if not nbytes:
            return
        room = _room(nbytes)
        _fill(end, memoryview(room))
        end.sendall(room)


_rooms = {}


def _room(nbytes):
    if nbytes not in _rooms:
        _rooms[nbytes] = bytearray(nbytes)
    return _rooms[nbytes]


def run(*command):
    subprocess.run(shlex.split(" ".join(command)), check=True)


def write_files(folder):
    """Write what the hosts need to a folder: the stand-in for ssh, and their names."""
    (folder / "ssh").write_text(SSH % (folder, folder))
    (folder / "ssh").chmod(0o755)
    names = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} {socket.gethostname()}\n{names}")
    (folder / "nsswitch").write_text("hosts: files\n")


def cluster(rate):
    """Two namespaces on a bridge, which this host, from which the ranks are started, is on too."""
    run("ip link add choros0 type bridge")
    run(f"ip addr add {HERE}/24 dev choros0")
    run("ip link set choros0 up")
    for i, (name, address) in enumerate(HOSTS.items()):
        run(f"ip netns add {name}")
        run(f"ip link add chorosv{i} type veth peer name eth0 netns {name}")
        run(f"ip link set chorosv{i} master choros0 up")
        run(f"ip -n {name} addr add {address}/24 dev eth0")
        for device in ("eth0", "lo"):
            run(f"ip -n {name} link set {device} up")
        if rate:
            run(f"ip netns exec {name} tc qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 100ms")


def away():
    """Remove the namespaces and the bridge."""
    for i, name in enumerate(HOSTS):
        # The kernel removes a namespace's devices some time after the namespace: the next ``cluster`` would find them.
        subprocess.run(["ip", "link", "del", f"chorosv{i}"], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", "choros0"], stderr=subprocess.DEVNULL, check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("mpi", "sums", "center"), required=True)
    parser.add_argument("--rate", default="", help="of the cable between the hosts, such as 1gbit; default: as it is")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--here", action="store_true", help="2 ranks of this machine, over its loopback (center)")
    parser.add_argument("--busy", action="store_true", help="rank 0 runs a loop of Python meanwhile (center)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        if options.busy and os.environ["PMI_RANK"] == "0":
            threading.Thread(target=_busy, daemon=True).start()
        {"mpi": mpi, "sums": sums, "center": center}[options.what](options.rounds)
        return
    mpiexec = Path(sys.executable).parent / "mpiexec"
    options_ = [sys.executable, __file__, "--rank", "--what", options.what, "--rounds", str(options.rounds)]
    options_ += ["--busy"] * options.busy
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as room:
        namespaces = options.what != "mpi" and not options.here
        if not namespaces:
            command = [str(mpiexec), "-n", "2", *options_]
            environment |= {"CHOROS_NETWORK": "lo"}
        else:
            write_files(Path(room))
            each = 2 if options.what == "sums" else 1
            hosts = ",".join(f"{name}:{each}" for name in HOSTS)
            how = ["-launcher", "ssh", "-launcher-exec", f"{room}/ssh", "-hosts", hosts, "-localhost", HERE]
            command = [str(mpiexec), *how, "-n", str(2 * each), *options_]
            environment |= {"CHOROS_NETWORK": "eth0"}
        try:
            if namespaces:
                cluster(options.rate)
            output = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=True
            )
        finally:
            if namespaces:
                away()
    results = [json.loads(line.partition(" ")[2]) for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    rate = options.rate or "not limited"
    where = "two namespaces" if namespaces else "one host"
    print(
        json.dumps(
            {"what": options.what, "where": where, "rate": rate, "busy": options.busy, "results": results}, indent=2
        )
    )


if __name__ == "__main__":
    main()
