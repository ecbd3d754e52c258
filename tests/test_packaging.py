"""Metadata: the recipe for conda-forge and CITATION.cff agree with pyproject.toml; the README for the package index."""

import pathlib
import re
import subprocess
import tomllib

import pytest

import choros

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
RECIPE = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()


def block(name):
    """The items of a list in the recipe."""
    lines = RECIPE.partition(f"\n  {name}:\n")[2].splitlines()
    items = []
    for line in lines:
        if not line.startswith("    - "):
            break
        items.append(line.removeprefix("    - "))
    return items


def plain(requirement):
    return re.sub(r"[\s=]+", "", requirement.replace(">=", ">"))


def test_the_recipe_has_the_requirements_of_the_package():
    run = {plain(line) for line in block("run")} - {"__linux"}
    assert run == {plain(text) for text in (*PROJECT["dependencies"], f"python{PROJECT['requires-python']}")}
    host = {plain(line) for line in block("host")} - {"pip", plain("python 3.11.*")}
    assert host == {plain(text) for text in CONFIG["build-system"]["requires"]}


def test_the_recipe_has_the_version_the_command_and_the_summary():
    assert f'version: "{choros.__version__}"' in RECIPE
    [(name, entry)] = PROJECT["scripts"].items()
    assert f"- {name} = {entry}\n" in RECIPE
    assert f'summary: "{PROJECT["description"]}"' in RECIPE
    assert f"license: {PROJECT['license']}" in RECIPE


def test_the_citation_has_the_version_and_the_licence():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {choros.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


HOOK = CONFIG["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]


def substituted(text):
    """Return a text as the package index shows it, by the substitutions of pyproject.toml."""
    for rule in HOOK["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def readme():
    """The README as the package index shows it, by the fragments and substitutions of pyproject.toml."""
    before, insertion, after = HOOK["fragments"]
    text = (ROOT / "README.md").read_text()
    head, marker, rest = text.partition(before["end-before"])
    assert marker == after["start-at"] == "## Install\n"
    assert before["path"] == after["path"] == "README.md"
    return substituted(head + insertion["text"] + marker + rest)


def test_the_readme_of_the_package_index_has_no_relative_links():
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", readme())
    assert [target for pair in targets for target in pair if target and not target.startswith(("https://", "#"))] == []
    assert "[" in readme()  # the README still has code and lists
    assert "\n\nThis page names others without links: " in readme()


def test_each_sentence_of_the_readme_has_words_that_are_no_link():
    """The package index shows links as text: of a sentence that is only links, it would show names without a verb."""
    prose = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = prose.partition("## Install\n")[2]  # the links before it are left out
    link = r"\[[^\]]+\]\((?!https?:)[^)]*\)"
    for paragraph in re.split(r"\n\n|\n(?=[-|])", prose):
        sentences = re.split(r"(?<=[.?!)])\s+(?=[\[A-Z])", " ".join(paragraph.split()))
        dead = [text for text in sentences if re.fullmatch(rf"(?:{link}[,.]?\s*)+", text)]
        assert not dead


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [docs/a.md](docs/a.md#b).", "see docs/a.md."),
        ("[site](https://example.org/a) [here](#there)", "[site](https://example.org/a) [here](#there)"),
        ("![a](docs/a.svg)\nText", "Text"),
        ("Text\n\n[a](docs/a.md), [b](b.md),\n[c](c.md)\n\nText", "Text\n\nText"),
        ("Text\n\n[a](docs/a.md), [b](b.md).\n\nText", "Text\n\na, b.\n\nText"),
        ('<picture>\n<source srcset="docs/a.svg">\n<img src="docs/b.svg">\n</picture>\nText', "Text"),
    ],
)
def test_links_to_files_of_the_repository_become_text(text, shown):
    assert substituted(text) == shown


def test_the_root_has_no_output_of_a_run():
    """The source distribution has all files of the repository."""
    done = subprocess.run(
        ["git", "ls-files", "*.choros", "state"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip("this is no clone")
    assert done.stdout == ""


def test_the_extra_spark_names_its_backend():
    """The extra installs no backend, as a cluster has one; every message says which to add."""
    for file in (ROOT / "src").rglob("*.py"):
        source = file.read_text()
        offers = re.findall(r"pyspark is not installed: pip install '(.*?)'", source)
        assert set(offers) <= {"choros[spark,jax]"}, file
