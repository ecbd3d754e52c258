"""The table of keras_experiments: a slow and a fast network; one host sends all data, or each rank reads its own.

Two network namespaces of this machine stand for two hosts (root is needed), with one rank each. Rank 0 first trains
alone by plain Keras: the baseline of all ratios. Then both ranks train the same rows: synchronously (AllReduce) and
asynchronously (ADAG, the default of the examples), with the pictures from a server process on rank 0's host ("ship") or
from a file that each rank maps ("own"). Prints JSON.

    python benchmarks/distrib.py                                 # at 20 Mbit/s and at 10 Gbit/s
    python benchmarks/distrib.py --rates 100mbit --rows 4000 --epochs 5
"""

import argparse
import json
import os
import re
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hosts
import numpy as np

CLASSES, PORT, NETWORK = 10, 7099, "10.79.0.0/24"
WAYS = [(data, mode) for mode in ("sync", "async") for data in ("ship", "own")]


def pictures(rows, seed):
    """Return noise with a faint pattern for each class, as bytes, and the classes."""
    random, patterns = np.random.default_rng(seed), np.random.default_rng(0)
    marks = patterns.integers(0, 16, (CLASSES, 32, 32, 3))
    y = random.integers(0, CLASSES, rows)
    return (random.integers(0, 240, (rows, 32, 32, 3)) + marks[y]).astype("uint8"), y


def network():
    """Return a small compiled convolutional network."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(7)
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 255)]
    for filters in (16, 32, 64):
        parts += [layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")]
    model = keras.Sequential([*parts, layers.Flatten(), layers.Dense(CLASSES, "softmax")])
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Shipping(socketserver.ThreadingTCPServer):
    """A server of rows of the mapped pictures: a request is a count and row numbers, the answer their bytes."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, path):
        self.pictures = np.load(path, mmap_mode="r")
        super().__init__((hosts.HOSTS["choros-a"], PORT), ShippingHandler)


class ShippingHandler(socketserver.StreamRequestHandler):
    """One rank's connection."""

    def handle(self):
        while head := self.rfile.read(8):
            wanted = np.frombuffer(self.rfile.read(8 * int.from_bytes(head, "little")), np.int64)
            self.wfile.write(np.ascontiguousarray(self.server.pictures[wanted]).tobytes())


class Shipped:
    """A function from row numbers to pictures, which come from the chief's server."""

    def __init__(self):
        self._local = threading.local()

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()

    def __call__(self, numbers):
        if not hasattr(self._local, "file"):
            connection = socket.create_connection((hosts.HOSTS["choros-a"], PORT), 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.file = connection.makefile("rwb")
        wanted = np.asarray(numbers, np.int64).reshape(-1)
        self._local.file.write(len(wanted).to_bytes(8, "little") + wanted.tobytes())
        self._local.file.flush()
        return np.frombuffer(self._local.file.read(3072 * len(wanted)), "uint8").reshape(-1, 32, 32, 3)


def bytes_sent():
    """Return the bytes that this host has sent by its network."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line.split(":")[1].split()[8] for line in lines if line.strip().startswith("eth0")))


def rank(options):
    """Train in all ways as one rank; rank 0 prints the figures."""
    import keras

    import choros
    import choros.hvd as hvd

    class Clock(keras.callbacks.Callback):
        """The times of the baseline's epochs."""

        def __init__(self):
            super().__init__()
            self.ends = []

        def on_train_begin(self, logs=None):
            self.ends = [time.perf_counter()]

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append(time.perf_counter())

        def seconds(self):
            """Return the median of all epochs but the first, which compiles."""
            return statistics.median(np.diff(self.ends)[1:].tolist())

    hvd.init()
    folder = Path(options.rank)
    values = np.load(folder / "x.npy", mmap_mode="r")
    y, numbers = np.load(folder / "y.npy"), np.arange(len(values))
    test = pictures(1000, 2)
    if hvd.rank() == 0:
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(folder / "x.npy")])
        alone, clock = network(), Clock()
        alone.fit(values, y, options.batch, options.epochs, verbose=0, callbacks=[clock])
        baseline = {"seconds": clock.seconds(), "accuracy": alone.evaluate(*test, verbose=0)[1]}
    try:
        hvd.barrier()
        for data, mode in WAYS:
            model = network()
            algorithm = "allreduce" if mode == "sync" else "adag"
            x = choros.prefetch((numbers, y), augment=Shipped()) if data == "ship" else choros.prefetch((values, y))
            hvd.barrier()
            before = bytes_sent()
            trainer = choros.Trainer(model, algorithm)
            history = trainer.fit(x, None, 2 * options.batch, options.epochs, verbose=0, seed=1)
            hvd.barrier()
            nbytes = sum(hvd.allgather_object(bytes_sent() - before)) / options.epochs
            if hvd.rank() == 0:
                rows = sum(worker.rows for worker in history.run.workers) // options.epochs
                if rows != len(values):
                    raise SystemExit(f"{rows} of {len(values)} rows were trained")
                seconds = max(worker.seconds for worker in history.run.workers) / options.epochs  # without compiling
                figures = {
                    "data": data,
                    "mode": mode,
                    "seconds": seconds,
                    "of_baseline": seconds / baseline["seconds"],
                    "accuracy": model.evaluate(*test, verbose=0)[1],
                    "megabytes_an_epoch": nbytes / 1e6,
                }
                print("RESULT " + json.dumps(figures), flush=True)
        if hvd.rank() == 0:
            print("BASELINE " + json.dumps(baseline | {"parameters": alone.count_params()}), flush=True)
    finally:
        if hvd.rank() == 0:
            server.terminate()
            server.wait()


def measure(options, rate, folder):
    """Return the figures at one rate of the network."""
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "-H", ",".join(f"{name}:1" for name in hosts.HOSTS)]
    command += ["--ssh", str(folder / "ssh"), "--network", NETWORK, __file__]
    command += ["--rank", str(folder), "--epochs", str(options.epochs), "--batch", str(options.batch)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        hosts.cluster(rate)
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    finally:
        hosts.away()
    report = {"BASELINE": [], "RESULT": []}
    for line in done.stdout.splitlines():
        kind, _, text = line.partition("] ")[2].partition(" ")
        if kind in report:
            report[kind].append(json.loads(text))
    return {"rate": rate, "baseline": report["BASELINE"][0], "results": report["RESULT"]}


def count(text):
    """Return a whole number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)


def rates(text):
    """Return the rates in a list with commas."""
    if wrong := [rate for rate in text.split(",") if not re.fullmatch(r"[1-9]\d*[kmg]bit", rate)]:
        raise argparse.ArgumentTypeError(f"must be rates such as 20mbit,10gbit, got {wrong[0]}")
    return text.split(",")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=rates, default=["20mbit", "10gbit"], help="of each host's network, for tc")
    parser.add_argument("--rows", type=count, default=6000)
    parser.add_argument("--epochs", type=count, default=4)
    parser.add_argument("--batch", type=count, default=64, help="of each rank")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        Shipping(options.serve).serve_forever()
    elif options.rank:
        rank(options)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            hosts.write_files(folder)
            for file, array in zip(("x.npy", "y.npy"), pictures(options.rows, 1), strict=True):
                np.save(folder / file, array)
            results = [measure(options, rate, folder) for rate in options.rates]
        settings = {"rows": options.rows, "epochs": options.epochs, "batch": options.batch}
        print(json.dumps({**settings, "backend": os.environ.get("KERAS_BACKEND", "jax"), "rates": results}, indent=2))


if __name__ == "__main__":
    main()
