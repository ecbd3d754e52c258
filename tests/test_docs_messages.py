"""Messages of errors that the documentation quotes are those of the code."""

import ast
import inspect
import pathlib
import re

import pytest

from choros import errors

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
VALUE = "\0"  # stands for a value in the text of an f-string
KINDS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]


def texts_of(source):
    """Return the texts of a file's strings, with VALUE for each value of an f-string."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.format_spec) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in parts:
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@pytest.fixture(scope="module")
def texts():
    """The texts of all strings of the package that may be messages."""
    files = (ROOT / "src" / "choros").rglob("*.py")
    return {" ".join(text.split()) for file in files for text in texts_of(file.read_text()) if " " in text}


def holds(text, quoted):
    """Return whether a text of the code is in a quoted message, and is a large part of it."""
    literal = text.replace(VALUE, "")
    if len(literal) < max(12, 0.2 * len(quoted)):
        return False
    return re.search(".*?".join(re.escape(part) for part in text.strip(VALUE).split(VALUE)), quoted) is not None


def quotations():
    """Yield the page and the message of each error in a block of text, as Python prints it."""
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for name, message in re.findall(r"^choros\.errors\.(\w+): (.*(?:\n(?!choros\.).*)*)", block, re.MULTILINE):
                yield page.relative_to(DOCS).as_posix(), name, " ".join(message.split())


@pytest.mark.parametrize(("page", "name", "message"), list(quotations()))
def test_a_quoted_error_is_one_of_the_code(texts, page, name, message):
    assert name in KINDS
    assert any(holds(text, message) for text in texts)


def test_the_page_on_errors_quotes_a_message_of_each():
    quoted = {name for page, name, _ in quotations() if page == "reference/errors.md"}
    assert quoted == set(KINDS) - {"ChorosError"}


@pytest.mark.parametrize("name", KINDS)
def test_the_page_on_errors_has_the_fields_of_each(name):
    """Those in the docstring, under Attributes."""
    described = (inspect.getdoc(vars(errors)[name]) or "").partition("Attributes:\n")[2]
    fields = re.findall(r"^    (\w+): ", described, re.MULTILINE)
    page = (DOCS / "reference" / "errors.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
    assert [field for field in fields if f"`{field}`" not in row.split("|")[3]] == []
    assert bool(fields) is ("`" in row.split("|")[3])


TROUBLES = (DOCS / "troubleshooting.md").read_text()
CELLS = [line.split("|")[1] for line in TROUBLES.splitlines() if re.match(r"\| (?!message or symptom)", line)]


@pytest.mark.parametrize("quoted", [text for cell in CELLS for text in re.findall(r'"([^"]+)"', cell)])
def test_a_message_on_the_page_of_troubles_is_one_of_the_code(texts, quoted):
    command = [part.strip() for part in quoted.split("...") if part.strip()]
    assert any(re.search(".*".join(map(re.escape, command)), text) for text in texts)


def test_an_error_on_the_page_of_troubles_exists():
    named = {name for cell in CELLS for name in re.findall(r"`(\w+Error)\b", cell)} - {
        "ModuleNotFoundError",
        "TypeError",
    }
    assert len(named) > 6
    assert named <= set(KINDS)


def test_a_message_that_is_not_in_the_code_is_found():
    (text,) = texts_of('f"rank {rank} waited {s:.1f} s at the gate"')
    assert holds(text, "rank 3 waited 2.0 s at the gate of 4")
    assert not holds(text, "rank 3 waited 2.0 s at the door")
    assert not holds("a b", "a b")
