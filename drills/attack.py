"""A stranger on the network of a job: 100 connections and 10 MB a second at the listener that is open while it trains.

    python drills/attack.py

Ranks that mpiexec starts speak with the caller of a Trainer over a listener. It trains twice, once left alone, once
while somebody connects and leaves, says nothing, sends half a greeting, one with a wrong proof, an oversized one and
100 KB of noise. Prints JSON: whether the weights are the same to the bit, what was refused and logged, processor time
of the listener's threads over that of all processes of the job.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

CONNECTIONS, BYTES, COST = 100, 10e6, 0.05
NOISE = os.urandom(100_000)


def train(epochs: int) -> None:
    """The job; the last line tells the weights' digest and where time went."""
    sys.modules["tensorflow"] = (
        None if os.environ.get("KERAS_BACKEND") != "tensorflow" else sys.modules.get("tensorflow")
    )
    import keras
    import numpy as np

    import choros
    from choros.comm.tcp import auth_socket

    spent, lock, doors = [0.0], threading.Lock(), []
    listener_class = auth_socket.AuthListener
    authenticate, accept_loop = listener_class._authenticate, listener_class._accept_loop

    def measured_authenticate(listener, *guest):
        begun = time.thread_time()
        try:
            authenticate(listener, *guest)
        finally:
            with lock:
                spent[0] += time.thread_time() - begun

    def measured_accept_loop(listener):
        doors.append(threading.get_native_id())
        accept_loop(listener)

    listener_class._authenticate, listener_class._accept_loop = measured_authenticate, measured_accept_loop
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 64)).astype("float32")
    y = (x[:, :8].sum(1) > 0).astype("int32")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                print("training", flush=True)

        def on_epoch_end(self, epoch, logs=None):
            if epoch == epochs - 1:
                ticks = [Path(f"/proc/self/task/{door}/stat").read_text().rpartition(")")[2].split() for door in doors]
                spent[0] += sum(int(each[11]) + int(each[12]) for each in ticks) / os.sysconf("SC_CLK_TCK")

    begun = time.perf_counter()
    trainer = choros.Trainer(model, workers=2, launcher="mpiexec")
    history = trainer.fit(x, y, epochs=epochs, batch_size=64, seed=1, verbose=0, callbacks=[Note()])
    seconds = time.perf_counter() - begun
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    used = [resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    facts = {"weights": digest[:16], "loss": history.history["loss"][-1], "seconds": seconds, "listener": spent[0]}
    facts["processor"] = sum(each.ru_utime + each.ru_stime for each in used)
    facts["peak_mb"] = round(used[0].ru_maxrss / 1024)
    print(json.dumps(facts), flush=True)


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses at which a process listens."""
    results = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            results.add(os.readlink(each))
        except OSError:
            continue
    places = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in results:
            host, port = fields[1].split(":")
            places.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return places


def attack(place: tuple[str, int], over: threading.Event) -> dict[str, int]:
    """Do it until told to end; returns what was done."""
    greeting = b"choros 1" + os.urandom(16)
    ways = (
        b"",
        None,
        b"choros",
        greeting + os.urandom(32) + b"\2\0\0\0{}",
        greeting + os.urandom(32) + b"\xff" * 4,
        NOISE,
    )
    facts, silent, begun = {"connections": 0, "bytes": 0}, [], time.monotonic()
    while not over.is_set():
        behind = (time.monotonic() - begun) * CONNECTIONS - facts["connections"]
        if behind < 1:
            time.sleep(0.5 / CONNECTIONS)
            continue
        way = ways[facts["connections"] % len(ways)]
        if facts["bytes"] < (time.monotonic() - begun) * BYTES - len(NOISE):
            way = NOISE
        facts["connections"] += 1
        end = socket.socket()
        end.settimeout(2.0)
        try:
            end.connect(place)
            if way is None:
                silent.append(end)
                continue
            end.sendall(way)
            facts["bytes"] += len(way)
        except OSError:
            facts["bytes"] += len(way or b"")  # cut off in the middle of it
        end.close()
    for end in silent:
        end.close()
    return facts


def run(epochs: int, attacked: bool) -> dict:
    """One training."""
    command = [sys.executable, __file__, "--train", "--epochs", str(epochs)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    over, did = threading.Event(), {}
    output, errors = [], []
    reading = threading.Thread(target=lambda: errors.extend(job.stderr))
    reading.start()
    for line in job.stdout:
        output.append(line)
        if attacked and line.strip() == "training" and not did:
            (place,) = listening(job.pid)
            did["by"] = threading.Thread(target=lambda at=place: did.update(attack(at, over)))
            did["by"].start()
        if line.startswith("{"):
            over.set()
    over.set()
    reading.join()
    code = job.wait()
    if "by" in did:
        did.pop("by").join()
    assert code == 0, "".join(errors[-30:])
    turned = [re.search(r"choros: (\d+) peers? that did not know this job's secret", line) for line in errors]
    return {**json.loads(output[-1]), **did, "logged": sum(int(each[1]) for each in turned if each)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="be the job")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    if options.train:
        train(options.epochs)
        return 0
    quiet, attacked = run(options.epochs, False), run(options.epochs, True)
    seconds = attacked["seconds"]
    facts = {
        "same_weights": quiet["weights"] == attacked["weights"],
        "connections": attacked["connections"],
        "mb": round(attacked["bytes"] / 1e6, 1),
        "logged": attacked["logged"],
        "seconds": [round(quiet["seconds"], 2), round(seconds, 2)],
        "peak_mb": [quiet["peak_mb"], attacked["peak_mb"]],
        "cost": round(attacked["listener"] / attacked["processor"], 4),
        "at_most": COST,
    }
    print(json.dumps(facts, indent=1))
    return 0 if facts["same_weights"] and facts["logged"] and facts["cost"] < COST else 1


if __name__ == "__main__":
    sys.exit(main())
