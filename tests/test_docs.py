"""The documentation: its first example runs after the documented install, and its examples are marked as code."""

import doctest
import importlib
import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()
FIRST = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]


def test_the_first_example_follows_the_install_section():
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert headings[:2] == ["Install", "A first example"]
    assert README.index("pip install 'choros[jax]'") < README.index(FIRST) < README.index(f"## {headings[2]}")


def test_the_readme_is_short_and_shows_both_commands():
    assert len(README.splitlines()) <= 150
    assert {"make demo", "make test"} <= {line.partition("  ")[0] for line in README.splitlines()}


@pytest.fixture
def against_fit(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("against_fit")


def test_the_readme_has_the_measured_table_or_marks_earlier_figures(against_fit):
    measured = ROOT / "benchmarks" / "reports" / "against_fit.json"
    if measured.exists():
        table = against_fit.table(json.loads(measured.read_text()))
        assert against_fit.with_table(README, table) == README, "run benchmarks/against_fit.py --readme"
    else:
        assert "Preliminary: measured in " in README.partition(against_fit.BEGIN)[2].partition(against_fit.END)[0]


def test_the_readme_and_the_first_page_advise_the_same():
    """The tables "Is it for me?" differ only in their links."""
    tables = []
    for page in PAGES[0], ROOT / "docs" / "index.md":
        table = page.read_text().partition("\n## Is it for me?\n\n")[2].partition("\n\n")[0]
        assert table.startswith("| you have | use |\n")
        tables.append(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", table))
    assert tables[0] == tables[1]


def test_the_links_of_the_readme_lead_to_files():
    links = re.findall(r"""(?:\]\(|src(?:set)?=")(?!https?:)([^)"#]+)""", README)
    assert len(links) > 30
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def _anchors(page):
    """Return the anchors that a code host makes for the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_anchors_of_links_are_headings(page):
    """Those of the text, as the built site has more headings than a code host shows."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    targets = [(page.parent / file if file else page, anchor) for file, anchor in links]
    missing = [(str(file), anchor) for file, anchor in targets if file.suffix == ".md" and anchor not in _anchors(file)]
    assert not missing


@pytest.mark.long
def test_the_first_example_runs_as_it_is(user, tmp_path):
    """With no keras.json, then with the one that Keras wrote, which names TensorFlow."""
    (tmp_path / "first.py").write_text(FIRST)
    written = user.home / ".keras" / "keras.json"
    assert not written.exists()
    for _ in range(2):
        done = user("first.py")
        assert float(re.findall(r"accuracy: ([\d.]+)", done.stdout)[-1]) > 0.9, done.stdout
        assert done.stderr.count("KERAS_BACKEND is not set") == 1, done.stderr
        assert json.loads(written.read_text())["backend"] == "tensorflow"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_prompt_is_in_a_block_of_python(page):
    language = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            language = "" if language else line.removeprefix("```") or "text"
        assert not line.startswith(">>>") or language in ("python", "pycon"), f"{page.name}:{number}: {line}"
    assert not language, f"{page.name}: a fence is not closed"


SELECTED = re.findall(
    r"`(tests/[\w/.]+\.py)`(?: \(((?:`\w+`(?:, )?)+)\))?", (ROOT / "docs" / "failures.md").read_text()
)


@pytest.mark.parametrize(("file", "message"), SELECTED, ids=lambda value: value.rpartition("/")[2])
def test_each_guarantee_after_a_failure_names_tests_that_exist(file, message):
    names = re.findall(r"^ *def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    assert names
    for word in re.findall(r"\w+", message):
        assert any(word in name for name in names), f"{file} has no test with {word} in its name"
        assert word not in file, f"pytest -k {word} selects all tests of {file}"


def test_each_guarantee_after_a_failure_has_a_test():
    page = (ROOT / "docs" / "failures.md").read_text()
    table = page.partition("| promise | tests |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(table) > 10
    assert len(SELECTED) > len(table)
    for line in table:
        assert any(f"`{file}`" in line for file, _ in SELECTED), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_tests_that_a_page_names_exist(page):
    missing = [name for name in re.findall(r"\btests/[\w/]+\.py\b", page.read_text()) if not (ROOT / name).exists()]
    assert not missing


def test_a_closing_fence_ends_what_an_example_prints():
    """The parser of the root's conftest.py, which pytest takes for files of text."""
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    before = doctest.DocTestParser
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    doctest.DocTestParser = before
    assert before.__name__ == "FencedParser", "pytest has loaded it"
    (example,) = module.FencedParser().get_examples("Text:\n\n```pycon\n>>> 1 + 1\n2\n```\nMore text.\n")
    assert (example.source, example.want, example.lineno) == ("1 + 1\n", "2\n", 3)


def test_the_license_is_in_the_tree_and_in_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "LICENSE").read_text()
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert re.match(r"\s*Apache License\s+Version 2.0, January 2004\s", text)
    assert "END OF TERMS AND CONDITIONS" in text


def test_what_the_documentation_installs_brings_a_backend():
    """An extra without a backend is named beside one, or brings something for an environment that has one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"pip install 'choros\[([\w,-]+)\]'", page.read_text()):
            named = set(names.split(","))
            assert named <= extras.keys()
            assert "spark" not in named or named & {"jax", "torch", "tensorflow"}, f"{page.name}: choros[{names}]"


def test_pages_name_the_versions_of_spark_that_are_tested():
    newest = re.search(r"^pyspark==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    oldest = re.search(r"'pyspark==([\d.]+)'", (ROOT / ".ci" / "run").read_text())[1]
    least = re.search(r'"pyspark>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    page = " ".join((ROOT / "docs" / "spark.md").read_text().split())
    assert (
        f"Spark must be {least} or later. The checks run Spark {newest}, and the main parts on Spark {oldest}." in page
    )
    for text in (README, (ROOT / "docs" / "index.md").read_text()):
        assert f"Spark {newest} and {oldest}" in text


def test_the_page_on_exactness_counts_the_models_of_the_zoo():
    lines = (ROOT / "docs" / "zoo.md").read_text().splitlines()
    results = [[cell.strip() for cell in line.split("|")[3:6]] for line in lines if line.startswith("| ")][1:]
    equal = sum(set(each) == {"equal"} for each in results)
    on_two = sum(each != ["equal"] * 3 and each[0] == each[2] == "equal" for each in results)
    inexact, refused = (sum(word in each for each in results) for word in ("inexact", "refused"))
    assert equal + on_two + inexact + refused == len(results)
    page = " ".join((ROOT / "docs" / "concepts" / "exactness.md").read_text().split())
    for text in (
        f"has {len(results)} small models",
        f"{equal} are equal on all three backends, and {on_two} more on JAX and TensorFlow",
        f"{inexact} draw random numbers that cannot be switched off, and {refused} are refused",
    ):
        assert text in page


def test_the_page_of_versions_has_those_that_are_required_and_tested():
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = {
        cells[1].strip().lower(): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) > 3
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(need for each in project["optional-dependencies"].values() for need in each),
    ]
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    names = {"pytorch": "torch", "spark": "pyspark"}
    for title in ("keras", "jax", "pytorch", "tensorflow", "numpy", "mpi4py", "ray", "spark"):
        name = names.get(title, title)
        least = next(re.findall(r">=([\d.]+)", need)[0] for need in required if re.match(rf"{name}[>\[]", need))
        assert f"{least} or later" in rows[title][2], title
        assert tested.get(name, tested.get(f"{name}-cpu")) in rows[title][3], title
