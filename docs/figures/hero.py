"""Draw the picture of README: what four workers did in two recorded runs, and measured speed-ups.

The strips are the events that ``Trainer(timeline=)`` wrote for AllReduce, which is synchronous, and for AEASGD, which
is asynchronous. They are kept in ``hero.json``, so that the picture can be drawn again without training. The bars are
those of ``benchmarks/reports/against_fit.json``, where that file exists.

    python docs/figures/hero.py              # draws hero-light.svg and hero-dark.svg beside it; needs matplotlib
    python docs/figures/hero.py --record     # trains first, and replaces hero.json
"""

import argparse
import io
import json
import os
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EVENTS = HERE / "hero.json"
SPEEDS = HERE.parents[1] / "benchmarks" / "reports" / "against_fit.json"
WORKERS, SECONDS = 4, 0.6
ALGORITHMS = {
    "AllReduce": "synchronous: every worker waits for all",
    "AEASGD": "asynchronous: no wait for other workers",
}
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
KINDS = {"compute": "#56b4e9", "data": "#009e73", "exchange": "#d55e00", "wait": "#c9a227"}
ORDER = ("compute", "data", "exchange", "wait")  # waits lie within exchanges
OTHER = "other: Python between these"  # the time of a lane without an event
BARS = {"allreduce": ("AllReduce", "#0072b2"), "aeasgd": ("AEASGD", "#d55e00")}
# Text, axes, and the time without an event.
THEMES = {"light": ("#1b1f24", "#8a929b", "#d3d8dd"), "dark": ("#e8ebee", "#6b757f", "#4d565f")}


def record(path: Path) -> None:
    """Train by both algorithms, and write the events after the first epoch, which compiles."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import tempfile

    import choros
    from choros.tools.demo.datasets.images import load_enlarged_digits
    from choros.tools.demo.load import LoadMeter
    from choros.tools.demo.measurement import read_timeline
    from choros.tools.demo.network import build_for

    digits, epochs, meter = load_enlarged_digits(), 12, LoadMeter()
    lanes = {}
    with choros.WorkerPool(WORKERS, echo=False) as pool, tempfile.TemporaryDirectory() as folder:
        for name in ALGORITHMS:
            events = Path(folder) / f"{name}.json"
            model = build_for(digits.x_train.shape[1:], digits.classes, seed=0)
            trainer = choros.Trainer(model, name, pool=pool, timeline=events)
            trainer.fit(digits.x_train, digits.y_train, batch_size=128, epochs=epochs, verbose=0, seed=0)
            lanes[name] = read_timeline(events, epochs, trainer.mode == "async").lanes
    cores = len(os.sched_getaffinity(0))
    facts = {
        "workers": WORKERS,
        "cores": cores,
        "load": round(meter.cores(), 1),
        "backend": os.environ["KERAS_BACKEND"],
    }
    path.write_text(json.dumps({**facts, "lanes": lanes}, separators=(",", ":")) + "\n")


def speeds(path: Path) -> dict[tuple[str, str, str], float]:
    """Return the ratio of each (model, backend, algorithm) of a report; an empty dict if there is no report."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text())["results"]
    return {(result["model"], result["backend"], result["algorithm"]): result["ratio"] for result in results}


def paint(axes: Any, lanes: list[Any], ink: str, blank: str) -> None:
    """Paint a lane for each worker. Time without an event has the color ``blank``."""
    for rank, lane in enumerate(lanes):
        axes.broken_barh([(0, 1e3 * SECONDS)], (rank - 0.4, 0.8), facecolors=blank, linewidth=0)
        for kind in ORDER:
            spans = [(1e3 * begin, 1e3 * (end - begin)) for name, begin, end in lane if name == kind]
            axes.broken_barh(spans, (rank - 0.4, 0.8), facecolors=KINDS[kind], linewidth=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [f"worker {rank}" for rank in range(len(lanes))])
    axes.tick_params(colors=ink, labelsize=9, length=0)
    axes.spines[:].set_visible(False)


def draw_speeds(axes: Any, found: dict[tuple[str, str, str], float], ink: str, pale: str) -> None:
    """Draw a bar for each model, backend and algorithm; 1 is plain fit."""
    groups = sorted({(model, backend) for model, backend, _ in found}, key=lambda g: (g[0], list(BACKENDS).index(g[1])))
    for shift, (algorithm, (name, color)) in zip((-0.2, 0.2), BARS.items(), strict=True):
        heights = [found.get((*group, algorithm), 0.0) for group in groups]
        bars = axes.bar([place + shift for place in range(len(groups))], heights, 0.38, color=color, label=name)
        axes.bar_label(
            bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=8, color=ink, padding=2
        )
    axes.axhline(1, color=ink, linewidth=1)
    axes.set_xticks(range(len(groups)), [f"{model}\n{BACKENDS[backend]}" for model, backend in groups])
    axes.set_ylim(0, 1.15 * max(1.0, *found.values()))
    axes.set_yticks([0, 1], ["0", "plain fit"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(pale)
    axes.tick_params(colors=ink, labelsize=9, length=0)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), labelcolor=ink, fontsize=9)
    axes.set_title("speed against model.fit on all cores", loc="left", fontsize=10.5, color=ink)


def draw(recorded: dict[str, Any], found: dict[tuple[str, str, str], float], theme: str) -> str:
    """Return the picture as an SVG text."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ink, pale, blank = THEMES[theme]
    rows = len(ALGORITHMS) + bool(found)
    figure = Figure(figsize=(9.2, 3.6 + 2.4 * bool(found)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 1, squeeze=False, height_ratios=[1.3, 1.3, 2.0][:rows])[:, 0]
    for axes, (name, text) in zip(panels, ALGORITHMS.items(), strict=False):
        paint(axes, recorded["lanes"][name], ink, blank)
        axes.set_xlim(0, 1e3 * SECONDS)
        axes.set_title(f"{name}, {text}", loc="left", fontsize=10.5, color=ink)
    panels[0].tick_params(labelbottom=False)
    shared = ", which other programs used too" if recorded["load"] > 0.2 else ""
    machine = f"{recorded['workers']} workers on {recorded['cores']} cores{shared}"
    panels[1].set_xlabel(f"milliseconds; {machine}", color=ink, fontsize=9)
    if found:
        draw_speeds(panels[2], found, ink, pale)
    figure.legend(
        handles=[Patch(facecolor=color, label=kind) for kind, color in {**KINDS, OTHER: blank}.items()],
        loc="outside upper right", ncols=len(KINDS) + 1, frameon=False, fontsize=9, labelcolor=ink,
    )  # fmt: skip
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hero"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, Helvetica, Arial, sans-serif", buffer.getvalue())
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def main() -> None:
    """Draw both pictures, after a recording if it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="train, and replace hero.json")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="default: the folder of this script")
    options = parser.parse_args()
    if options.record:
        record(EVENTS)
    recorded = json.loads(EVENTS.read_text())
    for theme in THEMES:
        (options.out / f"hero-{theme}.svg").write_text(draw(recorded, speeds(SPEEDS), theme))


if __name__ == "__main__":
    main()
