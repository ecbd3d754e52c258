"""
The timeline of a run
=====================

``Trainer(timeline=)`` writes what each worker did, as events for `ui.perfetto.dev <https://ui.perfetto.dev>`_. The file
is JSON, so a script can draw it too.
"""

import json
import tempfile
from pathlib import Path

import choros  # before Keras
import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype("float32"), y.astype("int32")
lanes = {}
for algorithm in (choros.AllReduce(), choros.AEASGD(window=8)):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder, "run.json")
        trainer = choros.Trainer(model, algorithm, workers=2, timeline=timeline)
        for _ in range(2):  # the first fit compiles the steps; the file has the events of the last one
            trainer.fit(x, y, batch_size=128, epochs=20, verbose=0)
        events = json.loads(timeline.read_text())["traceEvents"]
    lanes[type(algorithm).__name__] = [event for event in events if event["ph"] == "X"]

# %%
# An event has a process (``pid``: the rank + 1), a category, a begin and a duration in microseconds. The waits for
# other workers lie within the exchanges; at the end of an epoch workers wait for callbacks. The picture shows 100 ms
# after all ranks have begun. The steps of a window may be one event.

colors = {"compute": "C0", "data": "C2", "exchange": "C1", "wait": "C3"}
figure, panels = plt.subplots(2, 1, figsize=(6, 3.6), sharex=True, layout="constrained")
for axes, (name, events) in zip(panels, lanes.items(), strict=True):
    begin = max(min(event["ts"] for event in events if event["pid"] == pid) for pid in (1, 2)) / 1e3
    for kind, color in colors.items():
        for rank in (0, 1):
            bars = [
                (event["ts"] / 1e3 - begin, event["dur"] / 1e3)
                for event in events
                if (event["pid"] - 1, event["cat"]) == (rank, kind)
            ]
            axes.broken_barh(bars, (rank - 0.4, 0.8), color=color, label=kind if rank == 0 else None)
    axes.set(xlim=(0, 100), ylim=(1.5, -0.5), yticks=[0, 1], yticklabels=["rank 0", "rank 1"])
    axes.set_title(name, loc="left")
panels[1].set_xlabel("milliseconds")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False)
plt.show()
