"""Draw the figures of the benchmark page from benchmarks/reports/speed.json.

python docs/figures/benchmarks.py             # replaces speed-*.svg and exchanges-*.svg
"""

import json
from pathlib import Path
from typing import Any

from style import draw

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "reports" / "speed.json").read_text())["results"]
BACKENDS = ("jax", "torch", "tensorflow")
RATIOS = (
    ("1 worker,\nAllReduce, MLP", "one_worker", "allreduce"),
    ("2 workers,\nAllReduce, MLP", "allreduce_mlp", "allreduce"),
    ("2 workers,\nAllReduce, CNN", "allreduce_cnn", "allreduce"),
    ("2 workers,\nAEASGD, MLP", "aeasgd_mlp", "aeasgd"),
)


def speed(theme: dict[str, Any]) -> Any:
    """Return the speed against the same number of independent processes of ``fit``, by backend."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.2, 3), layout="constrained")
    axes = picture.subplots()
    for number, backend in enumerate(BACKENDS):
        values = [RESULTS[name][backend]["algorithms"][algorithm]["ratio"] for _, name, algorithm in RATIOS]
        places = [place + 0.27 * (number - 1) for place in range(len(RATIOS))]
        bars = axes.bar(places, values, 0.25, label=backend)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=theme["ink"])
    axes.axhline(1, color=theme["muted"], linewidth=1, linestyle="--")
    axes.set_xticks(range(len(RATIOS)), [label for label, _, _ in RATIOS])
    axes.set_ylabel("speed, independent\nprocesses = 1")
    axes.legend(frameon=False, ncols=3)
    return picture


def exchanges(theme: dict[str, Any]) -> Any:
    """Return the milliseconds of an exchange in shared memory against the bytes of the vector."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.2, 3), layout="constrained")
    axes = picture.subplots()
    for label, name, key in (
        ("all-reduce of 2 ranks", "allreduce_shm", "sum"),
        ("exchange with the center, 1 worker", "center_shm", "elastic_1_client"),
        ("memory copy", "allreduce_shm", "memcpy"),
    ):
        rows = sorted(RESULTS[name]["results"], key=lambda row: row["count"])
        megabytes = [4 * row["count"] / 1e6 for row in rows]
        milliseconds = [row["microseconds"][key] / 1e3 for row in rows]
        style = {"linestyle": "--", "color": theme["muted"]} if label == "memory copy" else {}
        axes.plot(megabytes, milliseconds, marker="o", label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="megabytes of the vector", ylabel="milliseconds")
    axes.legend(frameon=False)
    return picture


if __name__ == "__main__":
    print(*draw("speed", speed), *draw("exchanges", exchanges), sep="\n")
