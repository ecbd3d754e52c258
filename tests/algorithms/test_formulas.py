"""docs/algorithms.md: its formulas are those of the code, and its figures are drawn from the code."""

import ast
import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest

from choros import algorithms
from choros.algorithms import ALL, DiLoCo, ExchangeInfo
from choros.errors import UnstableAlgorithmError

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text()
WORKERS, RATE = 4, 0.1


def table(after, columns):
    """The rows of the first table after a text."""
    lines = PAGE.partition(after)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == columns for row in rows), rows
    return rows


RULES = table("## Update rules", 6)
BOUNDS = table("**Stability**", 2)


def of(text):
    """The algorithm of a cell such as ``EASGD`` or ``ADAG(eta=0.5)``, bound."""
    name, _, arguments = text.partition("(")
    keywords = {k.arg: ast.literal_eval(k.value) for k in ast.parse(f"f({arguments or ')'}").body[0].value.keywords}
    return getattr(algorithms, name)(**keywords).bound(WORKERS, RATE)


@pytest.mark.parametrize("row", RULES, ids=[row[0] for row in RULES])
def test_the_formula_of_each_rule_is_what_the_code_computes(row, rng):
    algorithm = of(row[0])
    x, s, c, r = rng.normal(size=(4, 5))
    w, k, sender = 7, 3, 2
    values = {name: getattr(algorithm, name) for name in ("alpha", "gamma", "eta") if hasattr(algorithm, name)}
    values |= {"x": x, "g": x, "s": s, "c": c, "r": r**2, "w": w, "k": k, "p": WORKERS, "sqrt": np.sqrt}
    values |= {"norm": np.linalg.norm, "u": lambda gradient: -RATE * gradient}
    if isinstance(algorithm, DiLoCo):
        values |= {"mu": algorithm.outer_momentum, "rate": algorithm.outer_rate}
    memory = algorithm.start(c, WORKERS)
    memory = (r**2,) if len(memory) == 1 else tuple(s if rank == sender else c for rank, _ in enumerate(memory))
    info = ExchangeInfo(1, k, sender) if algorithm.mode == "async" else ExchangeInfo(WORKERS)
    message = algorithm.propose(x, s, w)
    center, new_memory = algorithm.merge(c, message, info, memory)
    worker = algorithm.adopt(x, c if algorithm.shows == "before" else center)
    if algorithm.level == "gradients":
        worker = x - RATE * worker  # the optimizer's step, here plain SGD
    for name, formula, computed in (
        ("m", row[1], message),
        ("r_new", row[2], new_memory[0] if new_memory else None),
        ("c_new", row[3], center),
        ("x_new", row[4], worker),
    ):
        if formula:
            values[name] = eval(formula, {}, values)
            np.testing.assert_allclose(values[name], computed, rtol=1e-12, err_msg=f"{name} = {formula}")
    assert bool(row[2]) == (len(new_memory) == 1)


def test_every_rule_that_exchanges_has_a_formula():
    assert {row[0].partition("(")[0] for row in RULES} == {kind.__name__ for kind in ALL if kind.mode is not None}


@pytest.mark.parametrize("row", BOUNDS, ids=[row[0] for row in BOUNDS])
@pytest.mark.parametrize(("workers", "rate"), [(1, 0.01), (4, 0.1), (16, 3.0)])
def test_the_bound_of_each_rule_is_where_the_code_refuses(row, workers, rate):
    kind = getattr(algorithms, row[0])
    name, formula = row[1].split(" < ")
    limit = eval(formula, {}, {"p": workers, "z": min(rate, 1), "mu": DiLoCo().outer_momentum})
    argument = {"rate": "outer_rate"}.get(name, name)
    kind(**{argument: limit * 0.999}).bound(workers, rate)
    with pytest.raises(UnstableAlgorithmError, match=re.escape(f"{limit:.4g}")):
        kind(**{argument: limit * 1.001}).bound(workers, rate)


def test_the_sources_are_in_the_bibliography():
    entries = re.findall(r"^(\d+)\. ", PAGE.partition("## Bibliography")[2], re.MULTILINE)
    assert entries == [str(number + 1) for number in range(len(entries))]
    text = PAGE.partition("## Update rules")[2].partition("## Bibliography")[0]
    cited = {number for group in re.findall(r"\[(\d+(?:, \d+)*)\]", text) for number in group.split(", ")}
    assert cited == set(entries)


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib", reason="the figures are drawn by matplotlib: pip install 'choros[demo]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "figures"))  # of style.py
        spec = importlib.util.spec_from_file_location("update_rules", DOCS / "figures" / "update_rules.py")
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize("name", ["update_rules", "update_rules_workers"])
def test_the_figures_are_what_the_code_draws(name, figures):
    """Their descriptions hold the numbers, which are compared: the drawing itself depends on matplotlib's version."""
    drawn = figures.results(figures.all_paths()) if name == "update_rules" else figures.distances()
    for theme in ("light", "dark"):
        text = (DOCS / "figures" / f"{name}-{theme}.svg").read_text()
        saved = json.loads(re.search(r"<dc:description>(.*?)</dc:description>", text)[1])
        assert drawn.keys() == saved.keys()
        for key, values in saved.items():
            np.testing.assert_allclose(drawn[key], values, rtol=1e-4, atol=1e-5, err_msg=key)
    assert f"figures/{name}-light.svg" in PAGE
