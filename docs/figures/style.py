"""The look of figures that exist in a light and a dark form."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THEMES = {
    "light": {
        "ink": "#1b1f24",
        "paper": "#ffffff",
        "muted": "#8b949e",
        "colors": ("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
        "more": ("#e69f00", "#56b4e9"),
    },
    "dark": {
        "ink": "#e6edf3",
        "paper": "#14181e",
        "muted": "#8b949e",
        "colors": ("#56b4e9", "#e69f00", "#3fc59a", "#cc79a7"),
        "more": ("#f0e442", "#d55e00"),
    },
}


def draw(name: str, figure: Callable[[dict[str, Any]], Any], numbers: dict[str, Any] | None = None) -> Iterator[Path]:
    """Write ``name-light.svg`` and ``name-dark.svg``, the same bytes at each call.

    Args:
        name: the path without theme and ending, relative to this folder.
        figure: a function from a theme to a matplotlib figure.
        numbers: numbers that the file keeps as its description, for tests.

    Yields:
        The path of each file.
    """
    import matplotlib

    matplotlib.use("svg")
    for theme_name, theme in THEMES.items():
        ink = theme["ink"]
        parameters = {
            "svg.hashsalt": "choros",
            "svg.fonttype": "path",
            "font.size": 9,
            "axes.facecolor": theme["paper"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": matplotlib.cycler(color=theme["colors"]),
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        }
        with matplotlib.rc_context(parameters):
            path = Path(__file__).parent / f"{name}-{theme_name}.svg"
            about = {"Date": None, "Creator": None} | ({"Description": json.dumps(numbers)} if numbers else {})
            # Not transparent: a page of a code host shows the light form in its dark theme too.
            figure(theme).savefig(path, facecolor=theme["paper"], metadata=about)
            path.write_text(re.sub(r" +$", "", path.read_text(), flags=re.MULTILINE))
            yield path
