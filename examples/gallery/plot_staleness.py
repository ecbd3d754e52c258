"""
Staleness of asynchronous updates
=================================

Between two exchanges of a worker other workers exchange with the center. The number of these exchanges is the
*staleness* of the worker's update. A timeline has all exchanges, so they can be counted.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import choros  # before Keras
import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype("float32"), y.astype("int32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
with tempfile.TemporaryDirectory() as folder:
    timeline = Path(folder, "run.json")
    trainer = choros.Trainer(model, choros.DynSGD(window=4), workers=2, timeline=timeline)
    trainer.fit(x, y, batch_size=32, epochs=8, verbose=0)
    events = json.loads(timeline.read_text())["traceEvents"]

# %%
# The exchanges of all ranks in the order of their ends. Those between two exchanges of a rank are by others.
# ``pid`` is the rank + 1.

exchanges = [event for event in events if event.get("cat") == "exchange"]
ranks = [event["pid"] - 1 for event in sorted(exchanges, key=lambda event: event["ts"] + event["dur"])]
counts, last = Counter(), {}
for place, rank in enumerate(ranks):
    if rank in last:
        counts[place - last[rank] - 1] += 1
    last[rank] = place

# %%
# If two workers take turns, each update has a staleness of 1. On a busy machine a worker makes several exchanges while
# the other one waits for a core: these have 0, and the next one of the other worker has a large staleness. ``DynSGD``
# divides an update by its staleness + 1.

MOST = 8
shown = [counts[staleness] for staleness in range(MOST)]
shown.append(sum(counts.values()) - sum(shown))
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.bar([*map(str, range(MOST)), f"{MOST}+"], shown)
axes.set(xlabel="staleness", ylabel="updates")
axes.set_title(f"{sum(shown)} updates", loc="left")
plt.show()
