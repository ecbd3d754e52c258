"""Pictures of the concepts: their numbers are those of the code and of the reports, and pages have them with a text."""

import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = {
    "exactness": "concepts/exactness.md",
    "when-faster": "concepts/when-faster.md",
    "security": "security.md",
    "fit": "architecture.md",
}
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def concepts():
    """docs/figures/concepts.py, which imports style.py beside it."""
    pytest.importorskip("matplotlib", reason="the figures are drawn by matplotlib: pip install 'choros[demo]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "figures"))
        spec = importlib.util.spec_from_file_location("concepts", DOCS / "figures" / "concepts.py")
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def numbers_of(name, theme):
    text = (DOCS / "figures" / f"{name}-{theme}.svg").read_text()
    return json.loads(re.search(r"<dc:description>(.*?)</dc:description>", text)[1])


@pytest.mark.parametrize("theme", THEMES)
def test_the_gradients_of_the_picture_are_those_of_a_step(concepts, theme):
    saved, drawn = numbers_of("exactness", theme), concepts.gradients()
    assert saved.keys() == drawn.keys()
    for key, values in drawn.items():
        np.testing.assert_allclose(saved[key], values, rtol=1e-6, err_msg=key)
    assert drawn["trainer"] == pytest.approx(drawn["fit"], rel=1e-6)
    assert drawn["mean of means"] != pytest.approx(drawn["fit"], rel=0.1)
    assert f"{saved['fit'][0]:.1f}; the mean of the four means is {saved['mean of means'][0]:.3f}" in _alt("exactness")


@pytest.mark.parametrize("theme", THEMES)
def test_the_measured_speeds_of_the_picture_are_those_of_the_report(concepts, theme):
    assert numbers_of("when-faster", theme) == concepts.measured()


def test_the_calculated_speeds_follow_the_formula_of_the_page(concepts):
    """Seconds of a step of one process, over those on 1/k of its rows and of an exchange in each window."""
    workers, step = 4, 0.2
    for window in concepts.WINDOWS:
        exchange = concepts.STEP_SHARES * step
        expected = workers * step / (step + exchange / window)
        np.testing.assert_allclose(concepts.calculated(window, workers), expected)


def _alt(name):
    page = DOCS / PAGES[name]
    return re.search(rf"!\[(.+)\]\((?:\.\./)?figures/{name}-light\.svg\)", page.read_text())[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_picture_with_a_text_in_both_themes(name):
    assert len(_alt(name)) > 50
    for theme in THEMES:
        text = (DOCS / "figures" / f"{name}-{theme}.svg").read_text()
        assert "font-family" not in text  # texts are paths
        width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', text, re.DOTALL)[1])
        assert 9 * 350 / width > 9  # pixels of a letter's height, on a telephone of 390 pixels
