"""A control process: plain ``model.fit``, on one core if one is given. Started by ``common.Control``.

Prints ``ready`` and the seconds that building, compiling and the first epoch took. On a line of input it trains until
it is ended, and prints the time at the end of each epoch.
"""

import json
import os
import sys


def main() -> None:
    core, workload = int(sys.argv[1]), json.loads(sys.argv[2])
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before any framework counts the cores
    import time

    from common import hide_other_backends

    hide_other_backends()
    import keras
    from workloads import Workload

    load = Workload(**workload)
    x, y = load.data()
    begin = time.perf_counter()
    model = load.make()
    model.fit(x, y, batch_size=load.batch, epochs=1, verbose=0)
    print("ready", time.perf_counter() - begin, flush=True)
    sys.stdin.readline()
    report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(time.perf_counter(), flush=True))
    model.fit(x, y, batch_size=load.batch, epochs=1_000_000, verbose=0, callbacks=[report])


if __name__ == "__main__":
    main()
