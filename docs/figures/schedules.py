"""Draw the schedules of synchronous and asynchronous workers, from durations that are assumed, not measured.

python docs/figures/schedules.py             # replaces schedules-light.svg and schedules-dark.svg
"""

from typing import Any

import numpy as np

from style import draw

WORKERS, STEPS, END = 4, 6, 7.6
EXCHANGE = 0.12
SLOW = 3  # the worker whose steps take longer


def durations() -> np.ndarray:
    """Return the seconds of each step of each worker."""
    seconds = np.random.default_rng(3).uniform(0.75, 1.0, (WORKERS, STEPS * 3))
    seconds[SLOW] *= 1.35
    return seconds


def figure(theme: dict[str, Any]) -> Any:
    """Return the figure with one panel for each mode."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    compute, exchange = theme["colors"][:2]
    picture = Figure(figsize=(7.2, 3.6), layout="constrained")
    panels = picture.subplots(2, 1, sharex=True)
    for panel, title in zip(
        panels, ("Synchronous: each step waits for the slowest", "Asynchronous: no wait for other workers"), strict=True
    ):
        panel.set_title(title, loc="left", fontsize=10, color=theme["ink"])
        panel.set_yticks(range(WORKERS), [f"rank {rank}" for rank in range(WORKERS)])
        panel.invert_yaxis()
        panel.set_xlim(0, END)
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    seconds, begin = durations(), 0.0
    for step in range(STEPS):
        end = begin + seconds[:, step].max()
        for rank in range(WORKERS):
            panels[0].barh(rank, seconds[rank, step], 0.62, begin, color=compute)
            idle = end - begin - seconds[rank, step]
            panels[0].barh(rank, idle, 0.18, begin + seconds[rank, step], color=theme["muted"], alpha=0.5)
            panels[0].barh(rank, EXCHANGE, 0.62, end, color=exchange)
        begin = end + EXCHANGE
    for rank in range(WORKERS):
        at = 0.0
        for step in range(seconds.shape[1]):
            panels[1].barh(rank, seconds[rank, step], 0.62, at, color=compute)
            at += seconds[rank, step]
            if step % 2:
                panels[1].barh(rank, EXCHANGE, 0.62, at, color=exchange)
                at += EXCHANGE
    panels[1].set_xlabel("time (a drawing, not a measurement)")
    panels[1].set_xticks([])
    panels[0].tick_params(axis="x", length=0)
    parts = [Patch(color=compute, label="step"), Patch(color=exchange, label="exchange")]
    parts.append(Patch(color=theme["muted"], alpha=0.5, label="wait"))
    picture.legend(handles=parts, loc="outside lower left", ncols=3, frameon=False)
    return picture


if __name__ == "__main__":
    print(*draw("schedules", figure), sep="\n")
