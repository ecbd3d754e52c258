"""The pages for users of the predecessors: each line of their tables names its test, or says that there is none."""

import ast
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("from-alcf", "from-dist-keras", "from-horovod", "from-keras-experiments")
}
WITHOUT = re.compile(r"\b(untested|no test|none was run|the same|on three ranks|all tests|as above)\b")


def rows(page):
    """Return the cells of each row of a page's tables, after a check that their last column is that of tests."""
    results = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines())
        assert head[-1].strip(" |") in ("test", "tested by"), f"{page}: {head}"
        for cells in lines:
            assert len(cells) == len(head), f"{page}: {cells}"
        results += lines
    return results


@pytest.fixture(scope="module")
def functions():
    """The names of all functions of the tests, and of the benchmarks' files."""
    there = set()
    for path in (ROOT / "tests").rglob("*.py"):
        there |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    return there


@pytest.mark.parametrize("page", PAGES)
def test_each_line_names_its_test_or_says_that_there_is_none(page, functions):
    lines = rows(page)
    assert len(lines) > 30
    for cells in lines:
        last, named = cells[-1], False
        for word in re.findall(r"`([\w./:-]+)`", last):
            known = word in functions or (ROOT / word).exists()
            assert known or not word.startswith(("test_", "tests/", "over_")), f"{page}: {word} of {cells[0]}"
            named = named or known
        assert named or WITHOUT.search(last), f"{page}: {cells[0]} has no test: {last}"


@pytest.mark.parametrize(
    ("page", "module"), [("from-horovod", "choros.hvd"), ("from-dist-keras", "choros.spark.distkeras")]
)
def test_each_name_of_the_predecessor_is_on_its_page(page, module):
    missing = [name for name in importlib.import_module(module).__all__ if not re.search(rf"\b{name}\b", PAGES[page])]
    assert not missing
