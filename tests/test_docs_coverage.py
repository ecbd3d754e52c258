"""The reference has every public name, option of the command line, site, and variable ``CHOROS_*``."""

import ast
import importlib
import importlib.util
import pathlib
import pkgutil
import re
import sys

import pytest

from choros.cli import ALIASES, COMMANDS
from choros.launch.schedulers import presets

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages():
    """docs/extensions/reference_pages.py, which generates pages of the reference; it needs no Sphinx for this."""
    spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "extensions" / "reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_pages"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["reference_pages"]


def names_of(module):
    """Return what ``__all__`` has, and the modules that ``import choros`` gives."""
    return list(getattr(importlib.import_module(module), "__all__", ()))


def test_every_public_module_has_its_page(pages):
    there = {"choros", *(f"choros.{name}" for name in names_of("choros") if importlib.util.find_spec(f"choros.{name}"))}
    for package in ("hvd", "spark"):
        path = importlib.import_module(f"choros.{package}").__path__
        there |= {
            f"choros.{package}.{each.name}"
            for each in pkgutil.iter_modules(path)
            if each.name in ("callbacks", "elastic", "distkeras")
        }
    there -= {"choros.launch"}  # its names are in choros
    assert there == set(pages.MODULES)
    for module, page in pages.MODULES.items():
        assert f"<!-- generated: API of {module} -->" in (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize(
    "module",
    [
        "choros",
        "choros.algorithms",
        "choros.callbacks",
        "choros.cluster",
        "choros.data",
        "choros.hvd",
        "choros.hvd.callbacks",
        "choros.hvd.elastic",
        "choros.native",
        "choros.parallel",
        "choros.spark",
        "choros.spark.distkeras",
    ],
)
def test_every_public_name_is_on_its_page(pages, module):
    if module.startswith("choros.spark"):
        pytest.importorskip("pyspark", reason="pyspark is not installed here; the Spark tests of .ci/run have it")
    text = pages.api(module)
    missing = [name for name in names_of(module) if not re.search(rf"[.`]{name}(`|$)", text, re.MULTILINE)]
    assert names_of(module)
    assert not missing


@pytest.mark.parametrize("module", ["choros", "choros.algorithms", "choros.hvd", "choros.parallel", "choros.errors"])
def test_every_public_name_has_a_docstring(pages, module):
    loaded = importlib.import_module(module)
    names = pages.public_names(module)
    values = {name: getattr(loaded, name) for name in names}
    missing = [name for name, value in values.items() if callable(value) and not value.__doc__]
    assert names
    assert not missing


def test_attributes_with_a_common_description_get_an_entry_each(pages):
    lines = ["Attributes:", "    rank, size: int. Its rank and the number", "        of ranks.", "    host: str."]
    pages._for_napoleon(None, "class", "Place", None, None, lines)
    text = [": int. Its rank and the number", "        of ranks."]
    assert lines == ["Attributes:", f"    rank{text[0]}", text[1], f"    size{text[0]}", text[1], "    host: str."]


def test_every_option_is_described(pages):
    text = pages.command_line()
    for name, parser in pages.commands().items():
        begin = text.index(f"## choros {name}\n")
        section = text[begin : text.find("\n## ", begin + 1) if "\n## " in text[begin + 1 :] else None]
        for action in parser._actions:
            if action.dest == "action":  # its words have sections, such as "choros site init"
                assert all(f"## choros {name} {word}\n" in text for word in action.choices)
                continue
            hidden = action.help == "==SUPPRESS=="
            assert hidden or (action.help or "").strip(), (
                f"choros {name} {action.option_strings or action.dest}: no help"
            )
            for option in () if hidden else action.option_strings:
                assert f"`{option}`" in section, f"choros {name} {option}"


def test_a_code_host_shows_the_list_of_the_commands():
    """The build replaces the list by the options of each command."""
    page = (DOCS / "reference" / "cli.md").read_text()
    listed = re.findall(r"^- \[`choros (\w+)`\]\(\.\./\.\./src/choros/cli/(\w+)\.py\): (.*)$", page, re.MULTILINE)
    assert listed == [(name, name, text) for name, text in COMMANDS.items()]
    assert page.rstrip().endswith(listed[-1][2])
    for alias, name in ALIASES.items():
        assert f"`{alias}` is `{name}`" in page


def test_a_code_host_shows_the_list_of_the_files_of_rules():
    folder = ROOT / "src" / "choros" / "tools" / "doctor" / "rules"
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    page = (DOCS / "reference" / "doctor.md").read_text()
    listed = re.findall(r"^- \[(\w+\.py)\]\(\.\./\.\./src/choros/tools/doctor/rules/\1\): (.*)$", page, re.MULTILINE)
    heads = [ast.get_docstring(ast.parse(path.read_text())).splitlines()[0].rstrip(".") for path in files]
    assert listed == [(path.name, head) for path, head in zip(files, heads, strict=True)]


def test_every_site_is_in_the_table_with_what_it_requires(pages):
    rows = {line.split("|")[1].strip(" `"): line for line in pages.sites().splitlines()[2:]}
    assert set(rows) == set(presets()) - {"generic"}
    for option in ("--account", "--filesystems"):
        assert f"`{option}`" in rows["polaris"]
    assert "`--filesystems`" not in rows["lumi"]
    assert "pals | 104 cores, 12 GPUs | 12, each with 3 cores and 1 GPU" in rows["aurora"]


def test_a_code_host_shows_the_list_of_the_sites():
    folder = ROOT / "src" / "choros" / "launch" / "schedulers" / "presets"
    heads = {path.name: path.read_text().splitlines()[0] for path in sorted(folder.glob("*.toml"))}
    page = (DOCS / "reference" / "sites.md").read_text()
    folder_of_links = re.escape("../../src/choros/launch/schedulers/presets")
    listed = re.findall(rf"^- \[(\w+\.toml)\]\({folder_of_links}/\1\): (.*)$", page, re.MULTILINE)
    begin = "# Facts for a job's script on "
    assert listed == [
        (name, head.removeprefix(begin).rstrip(".")) for name, head in heads.items() if name != "generic.toml"
    ]


def test_every_variable_is_described():
    used = set()
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".toml"):
            used |= set(re.findall(r"\bCHOROS_[A-Z]+(?:_[A-Z]+)*\b(?!_)", path.read_text()))
    described = set(re.findall(r"`(CHOROS_[A-Z_]+)`", (DOCS / "reference" / "environment.md").read_text()))
    built = {
        name for name in described if name.startswith(("CHOROS_MPI_", "CHOROS_LOCAL_"))
    }  # from parts of their names
    assert len(used) > 30
    assert used - described == set()
    assert described - used - built == set()


def test_every_error_is_in_the_table(pages):
    table = (DOCS / "reference" / "errors.md").read_text()
    names = pages.public_names("choros.errors")
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in table] == []


def test_every_rule_of_the_doctor_is_described(pages):
    text = pages.doctor_rules()
    assert len(re.findall(r"^## ", text, re.MULTILINE)) > 20
    assert "## oversubscribed" in text


def test_plain_markdown_becomes_directives_of_the_site(pages, tmp_path):
    (tmp_path / "a-dark.svg").touch()
    text = "![Words.](a-light.svg)\n![Words.](b-light.svg)\n\n<!-- toctree\n:caption: Run\n\none\n../two\n-->\n"
    assert pages.with_directives(text, tmp_path) == (
        "```{image} a-light.svg\n:class: only-light\n:alt: Words.\n```\n"
        "```{image} a-dark.svg\n:class: only-dark\n:alt: Words.\n```\n"
        "![Words.](b-light.svg)\n\n"
        "```{toctree}\n:hidden:\n:caption: Run\n\none\n../two\n```\n"
    )


def test_a_file_that_a_code_host_links_to_is_included_in_the_site(pages, tmp_path):
    text = "<!-- include ../LOG.md -->\n[Log](../LOG.md)\nmore\n\n<!-- include ../notes/a.md -->\n[A](../notes/a.md)\n"
    assert pages.with_directives(text, tmp_path) == (
        "```{include} ../LOG.md\n:relative-docs: docs/\n```\n\n```{include} ../notes/a.md\n```\n"
    )


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_has_no_directive_or_role(page):
    """A code host shows them and their options as text, except the word ``code-cell`` of a block of code."""
    text = page.read_text()
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert not re.search(r"^(```|:::+)\{(?!code-cell\})|\{[a-z]+\}`|^:[a-z-]+:", shown, re.MULTILINE)
    included = re.findall(r"^<!-- include (\S+) -->\n\[.+\]\(\1\)$", text, re.MULTILINE)
    assert len(included) == text.count("<!-- include ")
    assert all((page.parent / name).exists() for name in included)
    assert not re.search(r"^<!-- generated: .* -->\n(\n|\Z)", text, re.MULTILINE)


@pytest.mark.parametrize("page", [DOCS / "more.md", DOCS / "index.md", *DOCS.glob("*/index.md")], ids=str)
def test_an_index_links_to_each_page_of_its_toctree(page):
    text = page.read_text()
    toctrees = re.findall(r"^<!-- toctree\n(.*?)^-->$", text, re.MULTILINE | re.DOTALL)
    names = [name for toctree in toctrees for name in toctree.split("\n\n")[-1].split()]
    if any(toctree.startswith(":glob:") for toctree in toctrees):
        names = [path.stem for name in names for path in page.parent.glob(f"{name}.md")]
    assert names
    links = re.findall(r"\]\(([^)#]*)", text)
    elsewhere = {"gallery/index": "../examples/gallery/README.rst"}  # the source of a page that the build writes
    missing = [
        name
        for name in names
        if not {f"{name}.md", f"{name}.ipynb", f"../{name.upper()}.md", elsewhere.get(name)} & set(links)
    ]
    assert not missing
    assert not [link for link in links if not (page.parent / link).exists()]


def test_links_lead_to_pages_of_the_site(pages):
    """Also those of pages that are links to files elsewhere, whose relative paths lead out of the site."""
    report, more = DOCS / "reports" / "speed.md", DOCS / "more.md"
    assert report.resolve().parent == ROOT / "benchmarks" / "reports"
    relinked = {
        (report, "../../docs/glossary.md#plain-fit"): "{doc}`a </glossary>`",
        (report, "table.md"): "{doc}`a </benchmarks>`",
        (report, "distrib.md"): "{doc}`a </reports/distrib>`",
        (more, "benchmarks.md"): "[a](benchmarks.md)",
        (more, "../examples/gallery/README.rst"): "{doc}`a </gallery/index>`",
        (more, "../examples/gallery/plot_windows.py"): "{doc}`a </gallery/plot_windows>`",
        (more, "../src"): "a",
    }
    for (page, target), expected in relinked.items():
        assert pages._relink(page, f"[a]({target})", ROOT) == expected
