"""Start-up under srun: 8 ranks of a Trainer script until they train, against 8 bare ``python -c 'import keras'``.

Brings up the SLURM of ``tests/real`` (root, and its packages, are needed), and runs both by turns. Prints JSON: seconds
from the start of ``srun`` to the last rank's, medians over the rounds. ``over`` is what the Trainer takes more until
training begins: than the bare ranks take in all (the bar), than they need to have imported Keras, and than the same
script without a Trainer (``plain``) needs to have its model built and compiled.

    python benchmarks/startup.py --rounds 3
"""

import argparse
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTBED = Path(__file__).parents[1] / "tests" / "real" / "conftest.py"
SCRIPT = """
import os, time
said = [("python", time.time())]

def note(name):
    said.append((name, time.time()))

import keras
note("keras")
import numpy as np
if os.environ["ALGORITHM"] != "plain":
    import choros

class Note(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        note("ready")
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            note("trained")

model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
note("model")
x = np.zeros((4096, 30), "float32")
if os.environ["ALGORITHM"] != "plain":
    trainer = choros.Trainer(model, os.environ["ALGORITHM"])
    trainer.fit(x, x[:, 0], batch_size=256, epochs=1, verbose=0, callbacks=[Note()])
if int(os.environ["SLURM_PROCID"]) == 0:
    print("SAID", *(f"{name}={at:.3f}" for name, at in said), flush=True)
"""
BARE = """
import time
begun = time.time()
import keras
print(f"SAID python={begun:.3f} keras={time.time():.3f}", flush=True)
"""


def step(ranks, environment, *command):
    """Return the ranks' times in seconds since the start of srun, and the seconds until srun ended."""
    arguments = ["srun", "--mpi=pmi2", f"-n{ranks}", *map(str, command)]
    begun = time.time()
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    ended = time.time() - begun
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    matches = [{name: float(at) - begun for name, at in re.findall(r"(\w+)=([\d.]+)", line)} for line in lines]
    return {name: max(each[name] for each in matches) for name in matches[0]} | {"ended": ended}


def medians(rounds):
    return {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    cluster = runpy.run_path(str(TESTBED))["Slurm"]()
    values = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    report = {"bare": [], "plain": [], "allreduce": []}
    with tempfile.TemporaryDirectory() as room:
        script = Path(room) / "script.py"
        script.write_text(SCRIPT)
        try:
            cluster.up()
            environment = {**os.environ, **cluster.environment, **values}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs, the next line this tree
            step(1, {**environment, "ALGORITHM": "allreduce"}, sys.executable, script)
            step(options.ranks, environment, sys.executable, "-c", BARE)  # reads all files once
            for _ in range(options.rounds):
                report["bare"].append(step(options.ranks, environment, sys.executable, "-c", BARE))
                for name in ("plain", "allreduce"):
                    more = {**environment, "ALGORITHM": name}
                    report[name].append(step(options.ranks, more, sys.executable, script))
        finally:
            cluster.down()
    middle = {name: medians(rounds) for name, rounds in report.items()}
    ready = middle["allreduce"]["ready"]
    bare = middle["bare"]
    floors = {"bare": bare["ended"], "imported": bare["keras"], "plain": middle["plain"]["model"]}
    over = {name: round(ready - floor, 2) for name, floor in floors.items()}
    facts = {"ranks": options.ranks, "cores": os.cpu_count(), "rounds": options.rounds, "bar": 2.0}
    print(json.dumps({**facts, "seconds": middle, "over": over, "each": report}, indent=2))


if __name__ == "__main__":
    main()
