"""The report as one HTML page. It loads no resources and has no scripts, and all external text is escaped."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from choros.tools.demo.report import figures
from choros.tools.demo.report.findings import findings
from choros.tools.demo.report.html_style import STYLE
from choros.tools.demo.report.results import PLAIN, Report, Result, Run, save
from choros.tools.demo.report.table import COLUMNS, WORK, Column, decimal, percent, summary, with_values

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WORKER = {
    "rank": "worker",
    "steps": "steps",
    "rows": "rows",
    "seconds": "train s",
    "startup": "start-up s",
    "samples_per_second": "samples/s",
    "exchanges": "exchanges",
    "staleness": "staleness",
    "exchanging": "exchanging",
    "waiting": "waiting for data",
}


def write(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html``, a PNG of each chart, and ``results.json``.

    Args:
        report: Report.
        folder: The directory, which is created if needed. Old charts that this report does not have are removed.

    Returns:
        The path of the page.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save(report, target / "results.json")
    drawn = figures.available(report)
    for figure in figures.FIGURES:
        path = target / f"{figure.name}.png"
        if figure in drawn:
            figure.png(report, path)
        else:
            path.unlink(missing_ok=True)
    page = target / "report.html"
    page.write_text(render(report), encoding="utf-8")
    return page


def render(report: Report) -> str:
    """Return the page.

    Args:
        report: Report.

    Returns:
        A complete HTML document with the charts as inline SVG.
    """
    algorithms = sum(result.algorithm != PLAIN for result in report.results)
    title = f"{algorithms} algorithm{'s' * (algorithms != 1)} on {report.setting.dataset}"
    charts = {figure.name: _chart(figure, report) for figure in figures.available(report)}
    first, work = with_values(report, COLUMNS), with_values(report, WORK)
    later = "".join(chart for name, chart in charts.items() if name != "target")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Choros: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<header><h1>{escape(title)}</h1>{_lead(report)}</header>",
        f'<main><section id="comparison">{charts.get("target", "")}{_table(report, first, "table")}'
        f"{_legend(first)}</section>",
        f'<section id="figures"><h2>How they train</h2>{later}</section>' if later else "",
        f'<section id="work"><h2>Work of the workers</h2>{_table(report, work, "work-table")}{_legend(work)}</section>'
        if any(result.runs for result in report.results)
        else "",
        '<section id="details"><h2>Each algorithm</h2><div class="cards">',
        *(_card(report, result) for result in report.ranked()),
        f'</div></section><section id="setting"><h2>Setting</h2>{_notes(report)}{_facts(report)}</section></main>',
        "<footer>Made by <code>choros demo</code>. All figures are in <code>results.json</code> beside this page."
        "</footer>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _chart(figure: figures.Figure, report: Report) -> str:
    """Return a chart for wide and for narrow screens; the style sheet shows one of them."""
    return (
        f'<figure id="figure-{figure.name}"><h3>{escape(figure.title)}</h3>'
        f"<figcaption>{escape(figure.text)}</figcaption>"
        f'<div class="wide">{figure.svg(report)}</div><div class="narrow">{figure.svg(report, figures.NARROW)}</div>'
        "</figure>"
    )


def _lead(report: Report) -> str:
    """Return the findings as paragraphs, the first as the lead."""
    sentences = findings(report)
    failed = [result.algorithm for result in report.results if result.failed]
    if failed:
        sentences.append(f"Failed: {', '.join(failed)}.")
    first, *others = sentences or ["Nothing was measured."]
    text = f'<p class="lead">{escape(first)}</p>' + "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    if report.interrupted:
        text += '<p class="banner">Interrupted: this holds what had been measured by then.</p>'
    return text


def _facts(report: Report) -> str:
    s = report.setting
    rows = f"{s.train_rows:,} to train on, {s.test_rows:,} held back" if s.train_rows else ""
    seeds = "" if s.seeds < 2 else f"{s.seeds}; figures are means over them"
    classes = f"{len(s.classes)}: {', '.join(s.classes)}" if s.classes else ""
    facts = {
        "Data": s.dataset,
        "Rows": rows,
        "Features": f"{s.features:,}" if s.features else "",
        "Classes": classes,
        "Network": s.network,
        "Optimizer": s.optimizer,
        "Target accuracy": f"{s.target:g}" if s.target else "",
        "Epochs": f"{s.epochs:,}" if s.epochs else "",
        "Global batch": f"{s.batch_size:,} rows" if s.batch_size else "",
        "Seeds": seeds,
        "Workers": f"{s.workers}" if s.workers else "",
        "Cores": f"{s.cores}" if s.cores else "",
        "Backend": s.backend,
        "Machine": s.machine,
        "Date": s.date,
        "Versions": ", ".join(f"{name} {version}" for name, version in s.versions.items()),
    }
    items = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    return f'<dl class="facts">{"".join(items)}</dl>'


def _table(report: Report, columns: tuple[Column, ...], name: str) -> str:
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.title)}</th>' for c in columns)
    rows = []
    for result in report.ranked():
        if name == "work-table" and not result.runs:
            continue
        link = f'<a href="#{_anchor(result)}">{escape(result.algorithm)}</a>'
        heading = f'<th scope="row">{link}{_badges(report, result) if name == "table" else ""}</th>'
        if result.runs:
            cells = "".join(
                f'<td data-label="{escape(c.title)}">{escape(c.show(report, result))}</td>' for c in columns
            )
        else:
            cells = f'<td class="failed" colspan="{len(columns)}">{escape(summary(result.error))}</td>'
        rows.append(f"<tr>{heading}{cells}</tr>")
    return (
        f'<table class="main" id="{name}"><thead><tr><th scope="col">algorithm</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _badges(report: Report, result: Result) -> str:
    text = ""
    if result.algorithm == report.best:
        text += '<span class="badge f1">most accurate</span>'
    if result.algorithm == report.fastest:
        text += '<span class="badge time">fastest</span>'
    if result.failed:
        text += '<span class="badge error">failed</span>'
    return text


def _legend(columns: tuple[Column, ...]) -> str:
    meanings = "; ".join(f"<em>{escape(c.title)}</em>: {escape(c.meaning)}" for c in columns)
    return f'<p class="soft">{meanings}.</p>'


def _notes(report: Report) -> str:
    return "".join(f'<p class="soft">{escape(note)}</p>' for note in report.setting.notes)


def _card(report: Report, result: Result) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in result.settings.items())
    parts = [
        f'<article id="{_anchor(result)}"><h3>{escape(result.algorithm)}{_badges(report, result)}</h3>',
        f'<p class="about">{_about(result.about)}</p>',
        f"<p><code>{escape(result.algorithm)}({escape(settings)})</code></p>",
    ]
    if result.error:
        parts.append(f"<pre>{escape(result.error.strip())}</pre>")
    if result.runs:
        parts.append(f'<div class="pair">{_seeds(report, result)}{_workers(result)}</div>')
    return "".join(parts) + "</article>"


def _about(text: str) -> str:
    """Return a description with its double backquotes as code."""
    return re.sub("``(.+?)``", r"<code>\1</code>", escape(text))


def _seeds(report: Report, result: Result) -> str:
    seconds: dict[str, Callable[[Run], float]] = {}
    if report.steady:
        seconds = {
            "to target s": lambda run: run.to_target(report.setting.target),
            "train s": lambda run: run.seconds,
            "start-up s": lambda run: run.startup,
        }
    rows = [
        (
            f"{run.seed}",
            decimal(run.accuracy, 4),
            *(decimal(of(run), 2) for of in seconds.values()),
            decimal(run.losses[-1][2], 4) if run.losses else "–",
        )
        for run in result.runs
    ]
    return _small(("seed", "accuracy", *seconds, "last loss"), rows)


def _workers(result: Result) -> str:
    workers = result.runs[0].workers
    keys = [key for key in _WORKER if any(key in worker for worker in workers)]
    rows = [tuple(_value(key, worker.get(key, math.nan)) for key in keys) for worker in workers]
    caption = f"The workers of seed {result.runs[0].seed}" if len(result.runs) > 1 else ""
    return _small([_WORKER[key] for key in keys], rows, caption) if rows else ""


def _small(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    head = list(head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{escape(title)}">{escape(cell)}</td>' for title, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table class="small">{top}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'


def _value(key: str, value: float) -> str:
    if key in ("exchanging", "waiting"):
        return percent(value)
    return decimal(value, 2 if key in ("seconds", "startup", "staleness") else 0)


def _anchor(result: Result) -> str:
    return "algorithm-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in result.algorithm.lower())
