"""Output for terminals by ``rich``, which Keras installs; elsewhere the plain text, which scripts can parse."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from choros.console import write_line

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ERROR": "bold red", "WARNING": "bold yellow", "problem": "bold yellow"}
# Verdicts of ``choros check``, trials of ``choros tune``: cells of a table, or before a colon or a bracket.
_WORDS = {
    r"(?<= )(differs|failed|refused)(?=:|  | \(|$)": "bold red",
    r"(?<= )(equal|trained)(?=  | \(|$)": "bold green",
    r"(?<= )inexact(?=  | \(|$)": "bold yellow",
    r"^(The fastest|Verdict)": "bold",
}


def terminal() -> Console | None:
    """Return a console if stdout is a terminal, ``NO_COLOR`` is not set and ``rich`` is installed; else None."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def write_rows(rows: Mapping[str, str]) -> None:
    """Write names and texts: aligned and wrapped on a terminal, else one line each.

    Example:
        >>> write_rows({"launcher": "single"})
        launcher     single
    """
    console = terminal()
    if console is None:
        for name, text in rows.items():
            write_line(f"{name:<12} {text}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, _STYLES.get(name, "bold")), Text(text))
    console.print(table)


def write_report(text: str) -> None:
    """Write lines; on a terminal, verdicts, failures, and lines that begin with ``ERROR`` or ``WARNING`` have colors.

    Example:
        >>> write_report("nothing to change")
        nothing to change
    """
    console = terminal()
    if console is None:
        write_line(text)
        return
    from rich.text import Text

    for line in text.splitlines():
        shown = Text(line, _STYLES.get(line.partition(" ")[0], ""))
        for pattern, style in _WORDS.items():
            shown.highlight_regex(pattern, style)
        console.print(shown, soft_wrap=True)
