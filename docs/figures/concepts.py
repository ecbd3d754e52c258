"""Draw the pictures of the pages on exactness, on speed and on security.

python docs/figures/concepts.py             # replaces exactness-*.svg, when-faster-*.svg and security-*.svg

The numbers of the first are those of a step of ``fit`` and of a step of a ``Trainer`` with four workers, those of the
second are of ``benchmarks/reports/distrib.json``. Each file has its numbers as its description.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from style import draw

ROWS, WORKERS = 10, 4
X = np.array([1, 1, 2, 1, 2, 1, 2, 3, 3, 3], "float32")[:, None]
Y = np.array([1, 2, 2, 1, 1, 3, 2, 4, 5, 4], "float32")[:, None]
DISTRIB = Path(__file__).parents[2] / "benchmarks" / "reports" / "distrib.json"
WIDTH = 4.6  # inches: at this width the texts can be read on a telephone
STEP_SHARES = np.logspace(-2, 1.5, 60)  # seconds of an exchange, in seconds of a worker's step
WINDOWS = (1, 8, 64)
NETWORKS = {"20mbit": "20 Mbit/s", "10gbit": "10 Gbit/s"}
LOCAL = """socket pair, memory without a name:
models as pickles, data, weights.
No address: no other process
can connect."""
TCP = """TCP of Choros: both ends prove that they
know the run's secret (HMAC-SHA256).
JSON and arrays of numbers, no pickle.
Not encrypted and not signed after that:
use a private network. Pickles for workers
of a launcher are files of your user."""
MODES = {"sync": "AllReduce", "async": "ADAG, window 8"}


def gradients() -> dict[str, list[float]]:
    """Return the gradients of one step: of each row, of each rank's mean, of ``fit`` and of a ``Trainer``.

    The model is one weight that is 0, with the squared error; the step is one of SGD with rate 1, so that the weight
    after it is the negative gradient.
    """
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    import choros
    from choros.data.sharding import share

    def step(workers: int) -> float:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        fit = choros.Trainer(model, workers=workers).fit if workers else model.fit
        fit(X, Y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
        return -float(model.get_weights()[0].item())

    rows = (-2 * X * Y)[:, 0]
    ranks = [float(rows[share(ROWS, rank, WORKERS)].mean()) for rank in range(WORKERS)]
    return {
        "rows": rows.tolist(),
        "ranks": ranks,
        "mean of means": [float(np.mean(ranks))],
        "fit": [step(0)],
        "trainer": [step(WORKERS)],
    }


def exactness(theme: dict[str, Any], numbers: dict[str, list[float]]) -> Any:
    """Return the rows of an uneven batch, the ranks' means, and three ways to the gradient of the batch."""
    from matplotlib.figure import Figure

    from choros.data.sharding import share

    picture = Figure(figsize=(WIDTH, 3.5), layout="constrained")
    batch, bars = picture.subplots(2, 1, height_ratios=(1, 1))
    for rank, color in enumerate(theme["colors"]):
        part = share(ROWS, rank, WORKERS)
        for row in range(part.start, part.stop):
            batch.barh(0, 0.9, 0.8, row + 0.05, color=color)
            batch.text(row + 0.5, 0, f"{numbers['rows'][row]:.0f}", ha="center", va="center", color=theme["paper"])
        middle = (part.start + part.stop) / 2
        batch.text(middle, -0.62, f"rank {rank}", ha="center", va="top", color=theme["ink"])
        batch.text(middle, -1.02, f"{numbers['ranks'][rank]:.2f}", ha="center", va="top", color=theme["ink"])
    for height, text in ((0, "gradient of a row"), (-1.02, "mean of a rank")):
        batch.text(-0.2, height, text, ha="right", va="top" if height else "center", color=theme["ink"])
    batch.set(xlim=(0, ROWS), ylim=(-1.5, 0.6))
    batch.set_title("A batch of 10 rows, 4 ranks", loc="left", fontsize=10, color=theme["ink"])
    batch.axis("off")
    shown = {
        "one process, fit": (numbers["fit"][0], theme["muted"]),
        "4 workers, AllReduce": (numbers["trainer"][0], theme["colors"][0]),
        "mean of the 4 means": (numbers["mean of means"][0], theme["colors"][1]),
    }
    drawn = bars.barh(
        list(shown), [abs(value) for value, _ in shown.values()], 0.6, color=[c for _, c in shown.values()]
    )
    bars.bar_label(drawn, [f"{value:.3f}" for value, _ in shown.values()], padding=3, color=theme["ink"])
    bars.set_xlim(0, 1.2 * max(abs(value) for value, _ in shown.values()))
    bars.invert_yaxis()
    bars.set_xticks([])
    bars.spines["bottom"].set_visible(False)
    bars.tick_params(axis="y", length=0)
    bars.set_title("Gradient of the batch", loc="left", fontsize=10, color=theme["ink"])
    return picture


def measured() -> dict[str, list[float]]:
    """Return the measured speed on each network, with plain Keras in one process as 1, by mode."""
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rates = {rate["rate"]: rate["results"] for rate in json.loads(DISTRIB.read_text())["rates"]}
    for name in NETWORKS:
        for result in rates[name]:
            if result["data"] == "own":
                speeds[result["mode"]].append(1 / result["of_baseline"])
    return speeds


def calculated(window: int, workers: int = 4) -> np.ndarray:
    """Return the speed-up of the page's formula, if a step of one process takes as long as all shares of it."""
    return workers / (1 + STEP_SHARES / window)


def when_faster(theme: dict[str, Any], speeds: dict[str, list[float]]) -> Any:
    """Return the calculated speed-up against the cost of an exchange, and the measured one on two networks."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    formula, bars = picture.subplots(2, 1, height_ratios=(1.2, 1))
    for window, color in zip(WINDOWS, theme["colors"], strict=False):
        formula.plot(STEP_SHARES, calculated(window), color=color, label=f"{window}")
    formula.axhspan(0, 1, color=theme["muted"], alpha=0.25, linewidth=0)
    formula.text(0.011, 0.5, "below 1 one process is faster", va="center", color=theme["ink"])
    formula.set(xscale="log", xlim=(STEP_SHARES[0], STEP_SHARES[-1]), ylim=(0, 4.3))
    formula.set(xlabel="seconds of an exchange / seconds of a worker's step", ylabel="speed-up")
    formula.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    formula.legend(title="window", frameon=False, loc="center left", bbox_to_anchor=(0, 0.56))
    formula.set_title("Calculated: 4 workers", loc="left", fontsize=10, color=theme["ink"])
    for shift, (mode, name), color in zip((-0.2, 0.2), MODES.items(), theme["colors"], strict=False):
        drawn = bars.bar([place + shift for place in range(len(NETWORKS))], speeds[mode], 0.38, color=color, label=name)
        bars.bar_label(drawn, fmt="%.2f", color=theme["ink"], padding=6)
    bars.axhline(1, color=theme["muted"], linewidth=1, linestyle="--")
    bars.set_xticks(range(len(NETWORKS)), [f"network of {name}" for name in NETWORKS.values()])
    bars.set(ylim=(0, 1.9), ylabel="speed, one process = 1")
    bars.legend(frameon=False, loc="upper left")
    bars.set_title("Measured: 2 hosts with one worker each", loc="left", fontsize=10, color=theme["ink"])
    return picture


def security(theme: dict[str, Any]) -> Any:
    """Return the processes of a run on two hosts, the connections between them, and a stranger."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    picture = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    axes = picture.subplots()
    axes.set(xlim=(0, 46), ylim=(-0.5, 54))
    axes.axis("off")
    blue, orange, green = theme["colors"][:3]

    def box(x: float, y: float, width: float, height: float, text: str, color: str, **style: Any) -> None:
        look = {"boxstyle": "round,pad=0,rounding_size=1", "facecolor": "none", "edgecolor": color, "linewidth": 1.3}
        axes.add_patch(FancyBboxPatch((x, y), width, height, **{**look, **style}))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=theme["ink"], linespacing=1.3)

    def arrow(
        begin: tuple[float, float], end: tuple[float, float], color: str, style: str = "<->", **more: Any
    ) -> None:
        properties = {"arrowstyle": style, "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0, **more}
        axes.annotate("", end, begin, arrowprops=properties)

    def words(x: float, y: float, text: str, **how: Any) -> None:
        axes.text(x, y, text, color=theme["ink"], linespacing=1.35, **{"ha": "left", "va": "center", **how})

    box(0.5, 34.5, 45, 19, "", theme["muted"], linestyle="--")
    words(2, 52, "host A")
    box(2, 44.5, 16, 5.5, "your process", blue)
    box(2, 36, 16, 4.5, "workers", blue)
    arrow((10, 44.5), (10, 40.5), blue)
    words(20, 46, LOCAL)
    box(0.5, 11.5, 45, 8.5, "", theme["muted"], linestyle="--")
    words(2, 18.5, "host B")
    box(2, 12.5, 16, 4.5, "workers", blue)
    arrow((10, 36), (10, 17), green)
    words(12, 27.2, TCP)
    words(20, 15, "the run's secret: from the launcher,\nin the environment or by stdin")
    box(2, 0, 16, 4.5, "a stranger", orange)
    arrow((10, 4.5), (10, 9.2), orange, "-|>")
    axes.plot([8.6, 11.4], [9.3, 10.9], color=orange, linewidth=1.8)
    axes.plot([8.6, 11.4], [10.9, 9.3], color=orange, linewidth=1.8)
    words(20, 4.6, "Without the secret a connection is\nclosed, after 10 s or 64 KB at most.")
    return picture


if __name__ == "__main__":
    step, speeds = gradients(), measured()
    print(*draw("exactness", lambda theme: exactness(theme, step), step), sep="\n")
    print(*draw("when-faster", lambda theme: when_faster(theme, speeds), speeds), sep="\n")
    print(*draw("security", security), sep="\n")
