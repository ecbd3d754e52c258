"""Names, configurations, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import choros
import choros.algorithms as algorithms
from choros.algorithms import (
    ADAG,
    AEASGD,
    ALL,
    DOWNPOUR,
    EAMSGD,
    EASGD,
    Algorithm,
    AllReduce,
    DiLoCo,
    ExchangeInfo,
    LocalSGD,
    by_name,
    from_config,
    to_config,
)
from choros.errors import InvalidInputError, UnknownAlgorithmError


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_found_by_every_spelling(kind):
    name = kind.__name__
    for spelling in (
        name,
        name.lower(),
        name.upper(),
        f"{name[:3]}-{name[3:]}",
        f"{name[:2]}_{name[2:]}",
        kind,
        kind(),
    ):
        assert by_name(spelling) == kind()


def test_an_object_is_kept_as_it_is():
    algorithm = AEASGD(window=32)
    assert by_name(algorithm) is algorithm


@pytest.mark.parametrize(
    ("wrong", "near"), [("aesgd", "AEASGD"), ("downpur", "DOWNPOUR"), ("dilocco", "DiLoCo"), ("hogwild", "Single, All")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UnknownAlgorithmError, match=near):
        by_name(wrong)


def test_an_unknown_attribute_has_a_hint():
    with pytest.raises(AttributeError, match=r"^module 'choros' has no attribute 'AESGD': did you mean 'AEASGD'\?$"):
        getattr(choros, "AESGD")  # noqa: B009 - mypy would refuse the attribute
    assert not hasattr(choros, "__wrapped__")


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="'aeasgd'"):
        by_name(3)
    with pytest.raises(TypeError, match="an algorithm is an object"):
        by_name(int)


def test_the_list_has_a_line_each_and_the_module_can_be_called():
    listing = algorithms()
    assert listing == algorithms.list_algorithms()
    assert list(listing) == [kind.__name__ for kind in ALL]
    assert all(20 < len(line) < 120 and line.endswith(".") for line in listing.values())
    assert len(set(listing.values())) == len(ALL)


def test_a_custom_algorithm_needs_its_class():
    @dataclass(frozen=True)
    class Mine(Algorithm):
        part: float = 0.5

    config = to_config(Mine(window=3))
    assert config == {"name": "Mine", "window": 3, "part": 0.5}
    assert from_config(config, Mine) == Mine(window=3)
    with pytest.raises(UnknownAlgorithmError, match="No algorithm is called 'Mine'"):
        from_config(config)
    assert algorithms.is_custom(Mine())
    assert not algorithms.is_custom(AEASGD())


def test_numpys_numbers_become_plain_ones():
    algorithm = AEASGD(window=np.int64(4), alpha=np.float32(0.25))
    assert algorithm == AEASGD(window=4, alpha=0.25)
    assert (type(algorithm.window), type(algorithm.alpha)) == (int, float)
    assert from_config(to_config(algorithm)) == algorithm
    assert DOWNPOUR(adagrad=np.bool_(True)).adagrad is True


REFUSED = [
    (AEASGD, {"alpha": float("nan")}, "finite"),
    (EASGD, {"alpha": float("inf")}, "finite"),
    (EASGD, {"alpha": -0.1}, "0 or more"),
    (EASGD, {"alpha": "0.1"}, "finite"),
    (EASGD, {"alpha": True}, "finite"),
    (EASGD, {"alpha": 1j}, "finite"),
    (EAMSGD, {"momentum": 1.0}, "below 1"),
    (EAMSGD, {"momentum": None}, "finite"),
    (LocalSGD, {"window": -1}, "whole number"),
    (LocalSGD, {"window": 2.0}, "whole number"),
    (LocalSGD, {"window": True}, "whole number"),
    (LocalSGD, {"window": None}, "whole number"),
    (AllReduce, {"window": 4}, "LocalSGD"),
    (DOWNPOUR, {"adagrad": "yes"}, "True or False"),
    (DOWNPOUR, {"gamma": float("nan")}, "finite"),
    (ADAG, {"eta": -1}, "0 or more"),
    (ADAG, {"eta": 0}, "above 0"),
    (DiLoCo, {"outer_rate": float("nan")}, "finite"),
]


@pytest.mark.parametrize(("kind", "wrong", "why"), REFUSED, ids=lambda value: str(value))
def test_hyper_parameters_are_refused_with_the_remedy(kind, wrong, why):
    with pytest.raises(InvalidInputError, match=why) as caught:
        kind(**wrong)
    message = str(caught.value)
    assert message.startswith(kind.__name__)
    assert next(iter(wrong)) in message
    assert "\n" not in message


def test_an_alpha_that_was_never_bound_is_said_so():
    with pytest.raises(ValueError, match="call bound"):
        EASGD().merge(1.0, 2.0, ExchangeInfo(), ())
