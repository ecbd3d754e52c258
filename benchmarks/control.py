"""A control process: plain ``model.fit`` on one core with one thread. Started by ``common.Control``.

Says ``ready`` once it has compiled; on a line it trains until it is ended, and tells the time at the end of each epoch.
"""

import json
import os
import sys


def main() -> None:
    core, workload = int(sys.argv[1]), json.loads(sys.argv[2])
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before any framework counts the cores
    import time

    import keras
    from workloads import Workload

    load = Workload(**workload)
    model, (x, y) = load.make(), load.data()
    model.fit(x, y, batch_size=load.batch, epochs=1, verbose=0)  # compile
    print("ready", flush=True)
    sys.stdin.readline()
    tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(time.perf_counter(), flush=True))
    model.fit(x, y, batch_size=load.batch, epochs=1_000_000, verbose=0, callbacks=[tell])


if __name__ == "__main__":
    main()
