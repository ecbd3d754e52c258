"""The report as one HTML page. It loads no resources and has no scripts, and all external text is escaped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from choros.tools.demo.report import figures
from choros.tools.demo.report.html_style import STYLE
from choros.tools.demo.report.results import Report, Result, save
from choros.tools.demo.report.table import COLUMNS, decimal, percent, summary

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
    "waiting": "waiting",
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
    title = f"{len(report.results)} algorithm{'s' * (len(report.results) != 1)} on {report.setting.dataset}"
    charts = [
        f'<figure id="figure-{f.name}"><h3>{escape(f.title)}</h3>'
        f"<figcaption>{escape(f.text)}</figcaption>{f.svg(report)}</figure>"
        for f in figures.available(report)
    ]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Choros: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<header><h1>{escape(title)}</h1>{_lead(report)}{_facts(report)}</header>",
        f'<main><section id="comparison"><h2>Comparison</h2>{_table(report)}{_legend(report)}</section>',
        f'<section id="figures"><h2>Figures</h2>{"".join(charts)}</section>' if charts else "",
        '<section id="details"><h2>Each algorithm</h2><div class="cards">',
        *(_card(report, result) for result in report.ranked()),
        "</div></section></main>",
        "<footer>Made by <code>choros demo</code>. All figures are in <code>results.json</code> beside this page."
        "</footer>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _lead(report: Report) -> str:
    """Return the result in one or two sentences."""
    by_name = {result.algorithm: result for result in report.results}
    sentences = []
    if report.best:
        best, fastest = by_name[report.best], by_name[report.fastest] if report.fastest else None
        sentences.append(f"<strong>{escape(best.algorithm)}</strong> reached the highest F1, {decimal(best.f1, 4)}")
        if fastest:
            sentences[0] += (
                f"; <strong>{escape(fastest.algorithm)}</strong> trained fastest, in {decimal(fastest.seconds, 2)} s"
            )
        sentences[0] += "."
    failed = [result.algorithm for result in report.results if result.failed]
    if failed:
        sentences.append(f"Failed: {escape(', '.join(failed))}.")
    lead = f'<p class="lead">{" ".join(sentences) or "Nothing was measured."}</p>'
    if report.interrupted:
        lead += '<p class="banner">Interrupted: this holds what had been measured by then.</p>'
    return lead


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


def _table(report: Report) -> str:
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.title)}</th>' for c in COLUMNS)
    rows = []
    for result in report.ranked():
        name = (
            f'<th scope="row"><a href="#{_anchor(result)}">{escape(result.algorithm)}</a>{_badges(report, result)}</th>'
        )
        if result.runs:
            cells = "".join(f"<td>{escape(c.show(report, result))}</td>" for c in COLUMNS)
        else:
            cells = f'<td class="failed" colspan="{len(COLUMNS)}">{escape(summary(result.error))}</td>'
        rows.append(f"<tr>{name}{cells}</tr>")
    return (
        '<div class="scroll"><table class="main" id="table"><thead><tr>'
        f'<th scope="col">algorithm</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _badges(report: Report, result: Result) -> str:
    text = ""
    if result.algorithm == report.best:
        text += '<span class="badge f1">best F1</span>'
    if result.algorithm == report.fastest:
        text += '<span class="badge time">fastest</span>'
    if result.failed:
        text += '<span class="badge error">failed</span>'
    return text


def _legend(report: Report) -> str:
    meanings = "; ".join(f"<em>{escape(c.title)}</em>: {escape(c.meaning)}" for c in COLUMNS)
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in report.setting.notes)
    return f'<p class="soft">{meanings}.</p>{notes}'


def _card(report: Report, result: Result) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in result.settings.items())
    parts = [
        f'<article id="{_anchor(result)}"><h3>{escape(result.algorithm)}{_badges(report, result)}</h3>',
        f'<p class="about">{escape(result.about)}</p>',
        f"<p><code>{escape(result.algorithm)}({escape(settings)})</code></p>",
    ]
    if result.error:
        parts.append(f"<pre>{escape(result.error.strip())}</pre>")
    if result.runs:
        parts.append(f'<div class="pair">{_seeds(result)}{_workers(result)}</div>')
    return "".join(parts) + "</article>"


def _seeds(result: Result) -> str:
    rows: list[tuple[str, ...]] = [
        (
            f"{run.seed}",
            decimal(run.f1, 4),
            decimal(run.accuracy, 4),
            decimal(run.seconds, 2),
            decimal(run.startup, 2),
            decimal(run.losses[-1][2], 4) if run.losses else "–",
        )
        for run in result.runs
    ]
    return _small(("seed", "F1", "accuracy", "train s", "start-up s", "last loss"), rows)


def _workers(result: Result) -> str:
    workers = result.runs[0].workers
    keys = [key for key in _WORKER if any(key in worker for worker in workers)]
    rows = [tuple(_value(key, worker.get(key, math.nan)) for key in keys) for worker in workers]
    caption = f"The workers of seed {result.runs[0].seed}" if len(result.runs) > 1 else ""
    return _small([_WORKER[key] for key in keys], rows, caption) if rows else ""


def _small(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{top}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _value(key: str, value: float) -> str:
    if key in ("exchanging", "waiting"):
        return percent(value)
    return decimal(value, 2 if key in ("seconds", "startup", "staleness") else 0)


def _anchor(result: Result) -> str:
    return "algorithm-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in result.algorithm.lower())
