"""``make_parallel`` over two CPU devices in one process against independent plain Keras processes on the same cores.

One process trains the CNN over two devices, a batch twice as long as that of each of two control processes; the two
sides take turns on the same two cores (see ``common.py``). The ratio is that of the rows trained.

    python benchmarks/devices.py --backend jax
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

from common import Control, arguments, compared, cores, emit, median, taking_turns
from workloads import Workload

from choros.cluster.hardware import variables

DEVICES = 2
TARGET = 0.90


def fit(workload: Workload, seconds: float, values: dict[str, str]) -> dict[str, float]:
    """Train over the devices while control trains on the same cores, in turns."""
    control = Control(workload, cores()[:DEVICES])
    task = json.dumps({"workload": workload.json(), "seconds": seconds})
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", task], stdout=subprocess.PIPE, text=True, env=values
    )
    ends: list[float] = []
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("the process of several devices failed")
        control.start()
        with taking_turns([process.pid], [result.pid for result in control.processes]):
            while (line := process.stdout.readline().strip()) not in ("", "done"):
                ends.append(float(line))
    finally:
        times = control.end()
        process.kill()
        process.communicate()
    return compared(ends, times, workload.steps)


def fit_over_devices(workload: dict[str, Any], seconds: float) -> None:
    from choros.parallel import logical_devices, make_parallel

    names = logical_devices(DEVICES)
    import keras

    load = Workload(**workload)
    model, (x, y) = make_parallel(load.make(), names), load.data(DEVICES)
    ends: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())
            print(ends[-1], flush=True)
            self.model.stop_training = ends[-1] - ends[0] > seconds

    model.fit(x, y, batch_size=load.batch * DEVICES, epochs=1, verbose=0)  # compile
    print("ready", flush=True)
    model.fit(x, y, batch_size=load.batch * DEVICES, epochs=100_000, verbose=0, callbacks=[Watch()])
    print("done", flush=True)
    time.sleep(60)  # until control has ended too, and this is ended


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        fit_over_devices(**json.loads(sys.argv[2]))
        return
    environment = dict(os.environ)
    options = arguments(__doc__)
    if len(cores()) < DEVICES:
        raise SystemExit(f"{DEVICES} cores are needed; this process may use {len(cores())}")
    os.sched_setaffinity(0, cores()[:DEVICES])
    one_thread = variables(1)  # is for control alone
    saved = {name: value for name, value in environment.items() if name in one_thread}
    user_environment = {name: value for name, value in os.environ.items() if name not in one_thread} | saved
    quick = options.quick
    load, seconds = Workload("cnn", 32, 3 if quick else 40), 3.0 if quick else 30.0
    rounds = options.rounds or (1 if quick else 3)
    runs = [fit(load, seconds, user_environment) for _ in range(rounds)]
    figures = {key: median(runs, key) for key in runs[0]}
    figures["ratios"] = [round(run["ratio"], 3) for run in runs]
    emit("devices", options, TARGET, {"devices": DEVICES, "rounds": rounds, "algorithms": {"make_parallel": figures}})


if __name__ == "__main__":
    main()
