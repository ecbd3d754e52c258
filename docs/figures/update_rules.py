"""Draw the figures of ``docs/algorithms.md``: the classes of ``choros.algorithms`` on a quadratic with two weights.

Each worker makes noisy gradient steps on f(x) = (0.6 x_1^2 + 0.2 x_2^2) / 2 and exchanges by ``propose``, ``merge`` and
``adopt`` of the algorithm. Asynchronous workers use ``InMemoryParameterServer``. Their speeds differ, so that the
updates are stale. ``update_rules-*.svg`` have the paths, ``update_rules_workers-*.svg`` the distances from the minimum.

    python docs/figures/update_rules.py             # replaces the figures beside it; needs matplotlib
"""

import heapq
import itertools
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from choros.algorithms import ALL, Algorithm, ExchangeInfo
from choros.param_server.in_memory import InMemoryParameterServer
from style import draw

CURVATURE = np.array([0.6, 0.2])
START = np.array([-4.0, 3.0])
RATE, NOISE = 0.1, 1.2
STEPS = 160  # optimizer steps of each worker
WINDOWS = {"Averaging": 40, "DiLoCo": 40}  # the rules for rare exchanges; all others have a window of 8
WORKERS = (1, 2, 4, 8, 16)
SEEDS = 4
MODES = {"sync": "synchronous", "async": "asynchronous", None: "no exchange"}


@dataclass
class Paths:
    """The weights of each worker after each step and exchange, and the center after each exchange."""

    workers: list[list[np.ndarray]]
    center: list[np.ndarray] = field(default_factory=list)

    @property
    def result(self) -> np.ndarray:
        """The weights that ``fit`` would return: the center, or without one those of the first worker."""
        return (self.center or self.workers[0])[-1]


class Worker:
    """A worker: its weights, its velocity if the algorithm has momentum, and its own noise."""

    def __init__(self, x: np.ndarray, momentum: float, rng: np.random.Generator) -> None:
        self.x, self.seen, self.velocity = x.copy(), x.copy(), np.zeros_like(x)
        self.momentum, self.rng, self.path = momentum, rng, [x.copy()]

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient at a point, with noise as of a batch."""
        return CURVATURE * x + self.rng.normal(0, NOISE, x.shape)

    def step(self, gradient: np.ndarray | None = None) -> None:
        """Make one optimizer step: plain SGD, with Nesterov momentum around it if the algorithm has some."""
        ahead = self.momentum * self.velocity
        self.velocity = ahead - RATE * (self.gradient(self.x + ahead) if gradient is None else gradient)
        self.x = self.x + self.velocity
        self.path.append(self.x.copy())


def simulate(algorithm: Algorithm, workers: int, seed: int = 0) -> Paths:
    """Train by an algorithm, in virtual time.

    Args:
        algorithm: Algorithm. Bound to the number of workers.
        workers: int. Number of workers; ``Single`` uses one.
        seed: int. Seed of the noise. Defaults to 0.

    Returns:
        The paths of the weights. In the asynchronous mode worker k takes 1 + k / workers times as long for a step as
        worker 0, and all make equally many steps.
    """
    name = type(algorithm).__name__
    count = 1 if name == "Single" else workers
    generators = np.random.default_rng(seed).spawn(count)
    starts = [START * [1, 1 - 0.45 * k] for k in range(count)] if name == "Ensemble" else [START] * count
    team = [Worker(x, algorithm.momentum, rng) for x, rng in zip(starts, generators, strict=True)]
    paths = Paths([worker.path for worker in team])
    if algorithm.mode is None:
        for worker in team:
            for _ in range(STEPS):
                worker.step()
    elif algorithm.mode == "sync":
        _synchronous(algorithm, team, paths)
    else:
        _asynchronous(algorithm, team, paths)
    return paths


def _synchronous(algorithm: Algorithm, team: list[Worker], paths: Paths) -> None:
    center, memory = START, algorithm.start(START, len(team))
    paths.center.append(center)
    for _ in range(STEPS // algorithm.window):
        if algorithm.level == "gradients":
            mean = sum(worker.gradient(worker.x) for worker in team) / len(team)
            for worker in team:
                worker.step(algorithm.merge(center, mean, ExchangeInfo(len(team)), memory)[0])
            paths.center.append(team[0].x)
            continue
        for worker in team:
            for _ in range(algorithm.window):
                worker.step()
        message = sum(algorithm.propose(worker.x, worker.seen, algorithm.window) for worker in team) / len(team)
        before = center
        center, memory = algorithm.merge(center, message, ExchangeInfo(len(team)), memory)
        for worker in team:
            worker.seen = before if algorithm.shows == "before" else center
            worker.x = algorithm.adopt(worker.x, worker.seen)
            worker.path.append(worker.x.copy())
        paths.center.append(center)


def _asynchronous(algorithm: Algorithm, team: list[Worker], paths: Paths) -> None:
    server = InMemoryParameterServer(algorithm, START, len(team))
    paths.center.append(server.center.copy())
    seconds = [algorithm.window * (1 + rank / len(team)) for rank in range(len(team))]
    events = [(time, rank) for rank, time in enumerate(seconds)]
    heapq.heapify(events)
    remaining = [STEPS // algorithm.window] * len(team)
    while events:
        time, rank = heapq.heappop(events)
        worker = team[rank]
        for _ in range(algorithm.window):
            worker.step()
        server.at(rank).exchange(worker.x, worker.seen, algorithm.window, np.zeros(0))
        worker.path.append(worker.x.copy())
        paths.center.append(server.center.copy())
        remaining[rank] -= 1
        if remaining[rank]:
            heapq.heappush(events, (time + seconds[rank], rank))


def algorithms(workers: int) -> dict[str, Algorithm]:
    """Return every algorithm by name, with the window of the figures, bound to the number of workers."""
    bound = {}
    for kind in ALL:
        algorithm = kind()
        if algorithm.mode is not None and algorithm.level == "parameters":
            algorithm = replace(algorithm, window=WINDOWS.get(kind.__name__, 8))
        bound[kind.__name__] = algorithm.bound(workers, RATE)
    return bound


def distance(algorithm: Algorithm, workers: int, seeds: int = SEEDS) -> float:
    """Return the root mean square, over the seeds, of the distance of the result from the minimum."""
    return float(np.sqrt(np.mean([(simulate(algorithm, workers, seed).result ** 2).sum() for seed in range(seeds)])))


def all_paths(workers: int = 4) -> dict[str, Paths]:
    """Return the paths of each algorithm."""
    return {name: simulate(algorithm, workers) for name, algorithm in algorithms(workers).items()}


def results(paths: dict[str, Paths]) -> dict[str, list[float]]:
    """Return the result of each algorithm."""
    return {name: [round(value, 6) for value in path.result.tolist()] for name, path in paths.items()}


def distances() -> dict[str, list[float]]:
    """Return the distances from the minimum with 1, 2, 4 ... workers, for each algorithm that exchanges."""
    names = [kind.__name__ for kind in ALL if kind.mode is not None]
    return {name: [round(distance(algorithms(count)[name], count), 6) for count in WORKERS] for name in names}


def draw_paths(theme: dict[str, Any], paths: dict[str, Paths]) -> Any:
    """Draw every other point of the workers' paths and the whole path of the center, a panel for each algorithm."""
    from matplotlib.patches import Ellipse

    figure = _figure(11.0, 7.4)
    panels = list(figure.subplots(-(-len(paths) // 5), 5, sharex=True, sharey=True).flat)
    for axes, (name, path) in zip(panels, paths.items(), strict=False):
        for level in (0.05, 0.4, 1.4, 3.4, 6.8):
            width, height = 2 * np.sqrt(2 * level / CURVATURE)
            line = {"edgecolor": theme["muted"], "alpha": 0.45, "linewidth": 0.8}
            axes.add_patch(Ellipse((0, 0), width, height, fill=False, **line))
        for points, color in zip(path.workers, theme["colors"], strict=False):
            axes.plot(*np.transpose(points[::2]), color=color, linewidth=0.8, alpha=0.75)
        if path.center:
            marker = "o" if len(path.center) < STEPS else None
            axes.plot(*np.transpose(path.center), color=theme["ink"], linewidth=1.3, marker=marker, markersize=2.4)
        axes.plot(0, 0, marker="+", color=theme["ink"], markersize=11)
        axes.set_title(name, fontsize=10.5, fontweight="bold", loc="left", pad=4)
        mode = next(kind.mode for kind in ALL if kind.__name__ == name)
        axes.text(0.97, 0.04, MODES[mode], transform=axes.transAxes, ha="right", fontsize=8)
        _tidy(axes, theme)
    for axes in panels:
        axes.set(xlim=(-5.4, 2.4), ylim=(-3.6, 4.6))
    for axes in panels[len(paths) :]:
        axes.set_axis_off()
    lines = panels[2].lines
    handles = [lines[0], next(line for line in lines if line.get_marker() == "o"), lines[-1]]
    words = ["a worker's weights, a color for each worker", "the center after each exchange", "the minimum"]
    figure.legend(handles, words, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def draw_workers(theme: dict[str, Any], far: dict[str, list[float]]) -> Any:
    """Draw the distance of the result from the minimum against the number of workers."""
    figure = _figure(11.0, 4.3)
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), ("sync", "async"), strict=True):
        shown = [name for name in far if next(k for k in ALL if k.__name__ == name).mode == mode]
        looks = zip(itertools.cycle((*theme["colors"], *theme["more"])), itertools.cycle("os^DvPX"), strict=False)
        for name, (color, marker) in zip(shown, looks, strict=False):
            axes.plot(WORKERS, far[name], color=color, marker=marker, markersize=5, linewidth=1.6, label=name)
        axes.set_title(MODES[mode].capitalize(), fontsize=10.5, fontweight="bold", loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORKERS, [str(count) for count in WORKERS])
        axes.set_yscale("log")
        axes.set_ylim(0.05, 30)  # DOWNPOUR with 16 workers is far outside
        axes.set_xlabel("workers")
        axes.legend(frameon=False, fontsize=9)
        _tidy(axes, theme)
    figure.axes[0].set_ylabel(f"distance from the minimum after {STEPS} steps")
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Any, theme: dict[str, Any]) -> None:
    axes.spines[["left", "bottom"]].set_color(theme["muted"])
    axes.tick_params(labelsize=8.5, length=3, color=theme["muted"])


if __name__ == "__main__":
    every, far_away = all_paths(), distances()
    files = [
        *draw("update_rules", lambda theme: draw_paths(theme, every), results(every)),
        *draw("update_rules_workers", lambda theme: draw_workers(theme, far_away), far_away),
    ]
    for file in files:  # a tenth of a point cannot be seen, and the paths have thousands of points
        text = re.sub(r'(?<= [dxy]=")[^"]+', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0]), file.read_text())
        file.write_text(text)
        print(file)
