"""A control process: plain ``model.fit`` on one core with one thread, on command. Started by ``common.Control``.

Reads a line for each fit (the number of epochs) and answers with the rows a second of the epochs after the first; on
the line "on" it trains until it is ended, and tells the time and its processor time at the end of each epoch.
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

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            ends.append(time.perf_counter())

    load = Workload(**workload)
    model, (x, y) = load.make(), load.data()
    ends: list[float] = []
    clock = Clock()
    model.fit(x, y, batch_size=load.batch, epochs=1, verbose=0)  # compile
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "on":
            tell = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: print(time.perf_counter(), time.process_time(), flush=True)
            )
            model.fit(x, y, batch_size=load.batch, epochs=1_000_000, verbose=0, callbacks=[tell])
        ends.clear()
        epochs = int(line)
        model.fit(x, y, batch_size=load.batch, epochs=epochs, verbose=0, callbacks=[clock])
        print((epochs - 1) * len(x) / (ends[-1] - ends[0]), flush=True)


if __name__ == "__main__":
    main()
