"""Draw the messages of a fit for the page on the architecture.

python docs/figures/fit.py             # replaces fit-light.svg and fit-dark.svg
"""

from typing import Any

from style import draw

WIDTH, HEIGHT = 46, 64.5  # tenths of an inch: at this width the texts can be read on a telephone
LANES = {"your script": 5, "driver": 16.5, "worker,\nrank 0": 29.5, "workers,\nother ranks": 40.5}
SCRIPT, DRIVER, FIRST, OTHERS = LANES.values()


def figure(theme: dict[str, Any]) -> Any:
    """Return the sequence diagram, whose time runs downwards."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    picture = Figure(figsize=(WIDTH / 10, HEIGHT / 10))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    to_workers, to_driver, mutual = theme["colors"][:3]

    def words(x: float, y: float, text: str, **how: Any) -> None:
        behind = {"facecolor": theme["paper"], "edgecolor": "none", "pad": 1}  # hides the line of a process
        how = {"ha": "center", "zorder": 3} | how
        axes.text(x, y, text, va="center", color=theme["ink"], linespacing=1.25, bbox=behind, **how)

    def box(left: float, top: float, right: float, bottom: float, text: str = "", **how: Any) -> None:
        style = {"boxstyle": "round,pad=0,rounding_size=0.8", "edgecolor": theme["muted"], "linewidth": 1.1}
        style |= {"facecolor": theme["paper"], "zorder": 2} | how
        axes.add_patch(FancyBboxPatch((left, top), right - left, bottom - top, **style))
        axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", color=theme["ink"], zorder=3)

    def loop(left: float, top: float, right: float, bottom: float, text: str) -> None:
        box(left, top, right, bottom, facecolor="none", linestyle="--", zorder=1)
        words(left + 1, top + 1.5, text, ha="left", fontstyle="italic")

    def message(y: float, begin: float, ends: tuple[float, ...], text: str, color: str, style: str = "-|>") -> None:
        for end in ends:
            look = {"arrowstyle": style, "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (end, y), (begin, y), arrowprops=look, zorder=4)
        lines = text.count("\n") + 1
        words((begin + ends[-1]) / 2, y - 0.4 - 0.85 * lines, text)

    for name, x in LANES.items():
        axes.plot([x, x], [4.5, HEIGHT - 0.5], color=theme["muted"], linewidth=1, zorder=0)
        box(x - 4.5, 0.5, x + 4.5, 4.5, name)

    message(8, SCRIPT, (DRIVER,), "fit(x, y)", to_workers)
    box(DRIVER - 9, 9.5, DRIVER + 9, 15, "check the arguments,\nbuild the model, pickle it\nwithout weights")
    message(20, DRIVER, (FIRST, OTHERS), "job, pickle, descriptors\nof shared memory", to_workers)
    message(23, OTHERS, (DRIVER,), "ready", to_driver)
    axes.plot([FIRST, OTHERS], [23, 23], "o", color=to_driver, markersize=4, zorder=4)
    message(26, DRIVER, (FIRST, OTHERS), "start", to_workers)
    loop(6.5, 27.5, WIDTH - 0.3, 56, "each epoch")
    loop(FIRST - 5, 29, WIDTH - 1.3, 39.5, "each global batch")
    message(38.5, FIRST, (OTHERS,), "sum of gradients,\nor exchange after\na window of steps", mutual, "<|-|>")
    message(43, FIRST, (DRIVER,), "logs of the epoch", to_driver)
    box(DRIVER - 9, 44, DRIVER + 9, 48, "run the callbacks\non your model")
    message(54.5, DRIVER, (FIRST, OTHERS), "control message: stop,\nlearning rate, weights,\nsettings", to_workers)
    message(59.5, FIRST, (DRIVER,), "final weights", to_driver)
    message(62.5, DRIVER, (SCRIPT,), "History", to_driver)
    return picture


if __name__ == "__main__":
    print(*draw("fit", figure), sep="\n")
