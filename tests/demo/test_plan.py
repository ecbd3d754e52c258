import os
import sys
import types

import pytest

from choros import algorithms
from choros.cluster.hardware import usable_cores, variables
from choros.errors import InvalidInputError, UnknownAlgorithmError
from choros.tools.demo import plan


@pytest.fixture
def bare(monkeypatch):
    """An environment that says nothing of backends and threads, and is put back afterwards."""
    saved_environment = dict(os.environ)
    for name in (*variables(1), "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in set(os.environ) - set(saved_environment):
        del os.environ[name]


def test_no_list_means_three_and_all_means_every_algorithm_in_order():
    assert [type(algorithm).__name__ for algorithm in plan.choose(None)] == ["AllReduce", "LocalSGD", "AEASGD"]
    assert [type(algorithm) for algorithm in plan.choose("All")] == list(algorithms.ALL)


def test_names_are_read_as_the_trainer_reads_them():
    chosen = plan.choose("DiLoCo, all_reduce,dynsgd,DILOCO")
    assert [type(algorithm).__name__ for algorithm in chosen] == ["DiLoCo", "AllReduce", "DynSGD"]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownAlgorithmError, match=r"^No algorithm .*'aesgd'.*EASGD"):
        plan.choose("single,aesgd")


@pytest.mark.parametrize("names", ["", " , "])
def test_an_empty_list_is_refused(names):
    with pytest.raises(InvalidInputError, match="names none"):
        plan.choose(names)


def test_what_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(plan, "is_installed", lambda module: module not in ("sklearn", "torch"))
    with pytest.raises(InvalidInputError, match=r'scikit-learn.*pip install "choros\[demo\]"'):
        plan.check_installed()
    with pytest.raises(InvalidInputError, match=r'torch is not installed: pip install "choros\[torch,demo\]"'):
        plan.choose_backend("torch")
    assert plan.choose_backend(None, {}) == "jax"


def test_keras_backend_counts_where_none_is_asked_for():
    assert plan.choose_backend(None, {"KERAS_BACKEND": "tensorflow"}) == "tensorflow"
    assert plan.choose_backend("jax", {"KERAS_BACKEND": "tensorflow"}) == "jax"
    with pytest.raises(InvalidInputError, match="openvino"):
        plan.choose_backend(None, {"KERAS_BACKEND": "openvino"})


@pytest.mark.usefixtures("bare")
def test_this_process_gets_one_thread_and_the_workers_the_cores(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert plan.prepare("torch", 1) == len(usable_cores())
    assert os.environ["KERAS_BACKEND"] == "torch"
    assert {name: os.environ[name] for name in variables(1)} == variables(1)


@pytest.mark.usefixtures("bare")
def test_threads_that_the_user_set_stay(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert plan.prepare("jax", 2) is None
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.usefixtures("bare")
def test_a_process_that_runs_another_backend_is_refused(monkeypatch):
    running = types.SimpleNamespace(backend=types.SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", running)
    with pytest.raises(InvalidInputError, match="already runs on jax"):
        plan.prepare("torch", 2)
    assert "KERAS_BACKEND" not in os.environ


def test_the_defaults_are_those_of_the_command():
    import argparse

    from choros.cli import demo

    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args, made = parser.parse_args(["demo"]), plan.Plan((), "jax")
    assert (args.workers, args.epochs, args.batch_size) == (made.workers, None, None)
    assert made.epochs == plan.EPOCHS["digits"]
    assert made.target == plan.TARGETS["digits"]
    assert made.batch_size == plan.BATCHES[True]
    assert (tuple(range(args.seeds)), args.seed, str(args.out)) == (made.seeds, 0, "choros-demo")
