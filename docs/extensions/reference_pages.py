"""Pages of the reference whose text is generated from the code: the API, commands, sites, and rules of the doctor.

A page has a line ``<!-- generated: NAME -->``, which Sphinx replaces when it reads the page, with the text that follows
it without an empty line: code hosts show that text. All pages are plain Markdown, so that code hosts show them too:
``with_directives`` adds what only Sphinx understands.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

import choros.launch.schedulers
import choros.tools.doctor.rules
from choros.cli import COMMANDS, command_parser
from choros.launch.schedulers import Site, load_site, presets


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command and of those below it, by its name; aliases are left out."""
    parsers = ((command, command_parser(command)) for command in COMMANDS)
    return {name: parser for pair in parsers for name, parser in _with_actions(*pair)}


def _with_actions(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command and those below it, such as "site init"."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{name} {word}", below) for word, below in action.choices.items())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    names = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return " ".join(names) if isinstance(names, tuple) else names


def _text(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    shown = action.default not in (None, False, argparse.SUPPRESS, "", []) and action.nargs != 0
    return text + (f" (default: {action.default})" if shown and "default" not in text else "")


def command_line() -> str:
    """Return the commands and their options as Markdown."""
    lines = []
    for name, parser in commands().items():
        lines += [f"## choros {name}", ""]
        usage = re.sub(r"^usage: ", "", parser.format_usage().strip())
        lines += [*(parser.description or "").splitlines(), "", "```text", usage, "```", ""]
        for group in parser._action_groups:
            actions = [
                each
                for each in group._group_actions
                if each.help != argparse.SUPPRESS and not isinstance(each, argparse._SubParsersAction)
            ]
            if not actions:
                continue
            if group.title not in ("positional arguments", "options"):
                lines += [f"**{group.title}**", ""]
            lines += ["| argument | description |", "|---|---|"]
            for action in actions:
                value = _value(action)
                words = [f"`{option}`" for option in action.option_strings] or [f"`{value}`"]
                value = f" `{value}`" if value and action.option_strings else ""
                lines.append(f"| {', '.join(words)}{value} | {_cell(_text(action, parser))} |".replace("`|", "`\\|"))
            lines.append("")
        if parser.epilog:
            lines += ["```text", *parser.epilog.splitlines(), "```", ""]
    return "\n".join(lines)


def _template(node: ast.expr) -> str:
    """Return a text of the code, with ``...`` for what it inserts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.BoolOp):
        return _template(node.values[-1])
    return "..."


def findings() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, description and remedy of each finding in the code of the rules."""
    folder = pathlib.Path(choros.tools.doctor.rules.__file__).parent
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id not in ("Finding", "made") or len(node.args) < 4 or not isinstance(node.args[0], ast.Name):
                continue
            arguments = [constants.get(each.id, each) if isinstance(each, ast.Name) else each for each in node.args]
            at = 3 if node.func.id == "made" else 2
            kind = node.args[0].id.lower()
            texts = [_template(each) for each in (arguments[1], arguments[at], arguments[at + 1])]
            yield kind, texts[0], texts[1].replace("{at}", "RANKS on HOST"), texts[2]


def doctor_rules() -> str:
    """Return the findings of the doctor as Markdown, a heading for each name."""
    by_name: dict[str, list[tuple[str, str, str]]] = {}
    for kind, name, description, remedy in findings():
        if name != "...":
            by_name.setdefault(name, []).append((kind, description, remedy))
    lines = []
    for name in sorted(by_name):
        lines += [f"## {name}", ""]
        for kind, description, remedy in by_name[name]:
            lines += [f"- **{kind}**: {_cell(description)}"]
            if remedy.strip(". "):
                lines += ["", f"  *Remedy*: {_cell(remedy)}"]
        lines.append("")
    return "\n".join(lines)


def known_sites() -> dict[str, Site]:
    """Return the site of each preset that names a scheduler, also if the user has a site of the same name."""
    folder = pathlib.Path(choros.launch.schedulers.__file__).parent / "presets"
    loaded = {name: load_site(str(folder / f"{name}.toml")) for name in presets()}
    return {name: site for name, site in loaded.items() if site.scheduler}


def required_options(site: Site) -> list[str]:
    """Return the options of ``choros submit`` without which it refuses a job on a site."""
    return ["--account"] * site.needs_account + re.findall(r"--[a-z-]+", " ".join(site.needs.values()))


def sites() -> str:
    """Return the presets of sites as a table of Markdown."""
    lines = [
        "| `--site` | machine | scheduler | `--mpi` | a node has for jobs | ranks on a node | required | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, site in known_sites().items():
        node = f"{site.cores_per_node} cores, {site.gpus_per_node} GPUs"
        ranks = f"{site.ranks_per_node}, each with {site.cores} cores and {site.gpus} GPU"
        options = ", ".join(f"`{option}`" for option in required_options(site))
        cells = (f"`{name}`", site.name, site.scheduler, site.mpi, node, ranks, options, "; ".join(site.source))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


# Public modules, and the pages that describe their names. A name of several modules is described at the first of them.
MODULES = {
    "choros.errors": "reference/errors",
    "choros.algorithms": "reference/api/algorithms",
    "choros": "reference/api/choros",
    "choros.callbacks": "reference/api/callbacks",
    "choros.cluster": "reference/api/cluster",
    "choros.data": "reference/api/data",
    "choros.native": "reference/api/native",
    "choros.parallel": "reference/api/parallel",
    "choros.hvd": "reference/api/hvd",
    "choros.hvd.callbacks": "reference/api/hvd",
    "choros.hvd.elastic": "reference/api/hvd",
    "choros.spark": "reference/api/spark",
    "choros.spark.distkeras": "reference/api/distkeras",
}


def public_names(module: str) -> list[str]:
    """Return the public names of a module: its ``__all__``, or without one what the module itself defines."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(loaded).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module and isinstance(value, type)
        ]
    return list(names)


# Classes of what functions and properties of the API return. They are described with the API, and have no public name.
RESULTS = {
    "choros": (
        "choros.tools.check.report.CheckReport",
        "choros.tools.check.report.Comparison",
        "choros.tools.check.report.Difference",
        "choros.training.run_record.Bottleneck",
        "choros.training.run_record.Restart",
    )
}


def _key(value: Any) -> Any:
    return value if inspect.isclass(value) or inspect.isroutine(value) else None


def api(module: str) -> str:
    """Return the directives of autodoc for each public name of a module, as Markdown."""
    described: dict[Any, str] = {}
    for other in MODULES:
        if other == module:
            break
        for name in public_names(other):
            described.setdefault(_key(getattr(importlib.import_module(other), name)), other)
    loaded = importlib.import_module(module)
    lines, elsewhere = [], {}
    doc = inspect.getdoc(loaded) or ""
    lines += ["```{eval-rst}", f".. py:module:: {module}", "   :no-index:", "", doc, ""]
    submodules = []
    for name in public_names(module):
        value = getattr(loaded, name)
        if inspect.ismodule(value):
            submodules.append(name)
        elif _key(value) is not None and _key(value) in described:
            elsewhere.setdefault(described[_key(value)], []).append(name)
        elif inspect.isclass(value):
            lines += [f".. autoclass:: {module}.{name}", "   :members:", "   :show-inheritance:", ""]
        elif inspect.isroutine(value):
            lines += [f".. autofunction:: {module}.{name}", ""]
        else:
            lines += [f".. autodata:: {module}.{name}", "   :no-value:", ""]
    for name in RESULTS.get(module, ()):
        lines += [f".. autoclass:: {name}", "   :members:", ""]
    lines += ["```", ""]
    for other, names in elsewhere.items():
        page = posixpath.relpath(MODULES[other], posixpath.dirname(MODULES[module]))
        lines += [f"Described in [{other}]({page}.md): {', '.join(f'`{name}`' for name in names)}.", ""]
    if submodules:
        lines += [f"Modules: {', '.join(f'`{module}.{name}`' for name in submodules)}.", ""]
    return "\n".join(lines)


GENERATED = {"command line": command_line, "doctor rules": doctor_rules, "sites": sites}


# Files outside of docs that have a page of the site. Pages link to the files, so that the links work on code hosts too.
_PAGES = {
    "CHANGELOG.md": "docs/changelog.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "benchmarks/reports/table.md": "docs/benchmarks.md",
    "examples/gallery/README.rst": "docs/gallery/index.rst",
    "examples/spark_higgs.ipynb": "docs/tutorials/spark_higgs.ipynb",
}


def _relink(path: pathlib.Path, text: str, root: pathlib.Path) -> str:
    """Return the text of a page with the links of the site: those to files with a page lead there, folders have none.

    Args:
        path: the page, which may be a symbolic link to a file elsewhere.
        text: its text.
        root: the folder that contains docs.
    """

    def linked(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        real = (path.resolve().parent / target).resolve()
        if not real.is_relative_to(root):
            return match[0]
        name = real.relative_to(root).as_posix()
        name = _PAGES.get(name, name)
        if name.startswith("benchmarks/reports/") and real.suffix == ".md":
            name = f"docs/reports/{real.name}"
        if name.startswith("examples/gallery/plot_"):
            name = f"docs/gallery/{real.stem}.rst"
        moved = name != real.relative_to(root).as_posix() or not path.resolve().is_relative_to(root / "docs")
        # By a role, since MyST follows symbolic links.
        if moved and name.startswith("docs/") and name.endswith((".md", ".ipynb", ".rst")):
            page = pathlib.PurePosixPath("/", *pathlib.PurePosixPath(name).parts[1:]).with_suffix("")
            return f"{{doc}}`{words.replace('`', '')} <{page}>`"
        if (root / name).is_dir():
            return words
        return f"[{words}]({posixpath.relpath(root / name, path.parent)}{anchor or ''})"

    if path.suffix == ".ipynb":
        text = re.sub(r"\]\(#([^)]+)\)", lambda match: match[0].lower(), text)  # as MyST spells the anchors
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", linked, text)


def with_directives(text: str, folder: pathlib.Path) -> str:
    """Return the text of a page with Sphinx's directives.

    A comment ``<!-- toctree ... -->`` becomes a hidden ``toctree`` with its lines. A comment ``<!-- include PATH -->``
    becomes the text of that file, and the lines after it, up to an empty one, are left out. An image ``NAME-light.svg``
    on a line without other text becomes two images, one for each theme, if ``NAME-dark.svg`` is beside it.

    Args:
        text: the text of the page.
        folder: the folder of the page.
    """

    def both(match: re.Match[str]) -> str:
        words, name = match.groups()
        if not (folder / f"{name}-dark.svg").exists():
            return match[0]
        return "\n".join(
            f"```{{image}} {name}-{theme}.svg\n:class: only-{theme}\n:alt: {words}\n```" for theme in ("light", "dark")
        )

    def included(match: re.Match[str]) -> str:
        # Links of a file outside of docs are relative to the root.
        relative = "" if "/" in match[1].removeprefix("../") else ":relative-docs: docs/\n"
        return f"```{{include}} {match[1]}\n{relative}```\n"

    text = re.sub(r"^!\[(.*)\]\((\S+)-light\.svg\)$", both, text, flags=re.MULTILINE)
    text = re.sub(r"^<!-- include (\S+) -->\n(?:.+\n)*", included, text, flags=re.MULTILINE)
    toctree = "```{toctree}\n:hidden:\n\\1```"
    return re.sub(r"^<!-- toctree\n(.*?)^-->$", toctree, text, flags=re.MULTILINE | re.DOTALL)


def _fill(app: Any, page: str, source: list[str]) -> None:
    docs = pathlib.Path(app.srcdir)
    path = pathlib.Path(app.env.doc2path(page))
    source[0] = _relink(path, with_directives(source[0], path.parent), docs.parent)

    def generated(match: re.Match[str]) -> str:
        kind, _, module = match[1].partition(" of ")
        if kind != "API":
            return GENERATED[match[1]]()
        from sphinx.ext.autodoc.mock import mock

        with mock(app.config.autodoc_mock_imports):
            return api(module)

    source[0] = re.sub(r"^<!-- generated: (.*) -->\n(?:.+\n)*", generated, source[0], flags=re.MULTILINE)


def _for_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lists of names that napoleon would not read as such.

    A list of arguments that continues on a second line is joined. Each of several attributes with a common description
    gets an entry.
    """
    at, heading = 0, ""
    while at < len(lines):
        if lines[at] and not lines[at].startswith(" "):
            heading = lines[at]
        if at + 1 < len(lines) and re.fullmatch(r"\s+(\w+, )*\w+,", lines[at]):
            lines[at : at + 2] = [f"{lines[at]} {lines[at + 1].strip()}"]
        elif heading == "Attributes:" and (several := re.match(r"( +)(\w+(?:, \w+)+)(:.*)", lines[at])):
            indent, names, text = several.groups()
            end = at + 1
            while end < len(lines) and lines[end].startswith(f"{indent} "):
                end += 1
            more = lines[at + 1 : end]
            lines[at:end] = [line for each in names.split(", ") for line in (f"{indent}{each}{text}", *more)]
        else:
            at += 1


def _without_private_bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Leave out the bases of a class that the API does not have."""
    from sphinx.ext.autodoc.mock import mock

    with mock(app.config.autodoc_mock_imports):
        public = [getattr(importlib.import_module(module), each) for module in MODULES for each in public_names(module)]
    ours = [base for base in bases if getattr(base, "__module__", "").startswith("choros.")]
    private = [base for base in ours if not any(base is value for value in public)]
    bases[:] = [base for base in bases if base not in private] or [object]


def setup(app: Any) -> dict[str, bool]:
    """Register the generators."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _for_napoleon, priority=400)  # before napoleon
    app.connect("autodoc-process-bases", _without_private_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
