"""docs/algorithms.md says what the classes say: names, modes, parameters and their defaults."""

import pathlib
import re
from dataclasses import fields

from choros import algorithms

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md"


def rows():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_algorithm_is_there_once():
    assert sorted(rows()) == sorted(kind.__name__ for kind in algorithms.ALL)
    assert all(len(row) == 4 for row in rows().values())


def test_modes():
    for name, row in rows().items():
        assert row[0].split(",")[0] == (algorithms.by_name(name).mode or "none"), name


def test_parameters_and_defaults():
    for name, row in rows().items():
        algorithm, text = algorithms.by_name(name), row[3].replace("as AEASGD", rows()["AEASGD"][3])
        stated = dict(re.findall(r"`(\w+)` \(([^):]+)", text))
        if algorithm.mode is None or algorithm.level == "gradients":
            assert stated == {}, name
            continue
        assert stated.keys() == {field.name for field in fields(algorithm)}, name
        for parameter, value in stated.items():
            expected = "0.9 / workers" if parameter == "alpha" else repr(getattr(algorithm, parameter))
            assert value == expected, (name, parameter)
