"""Arguments that have no effect give one warning, which says why and what to do."""

import keras
import numpy as np
import pytest

import choros
from choros.algorithms import Algorithm
from choros.errors import InvalidInputError
from choros.training import unused_arguments


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("algorithm", "how", "output"),
    [
        (choros.DOWNPOUR(gamma=0.5), {}, "gamma has no effect on DOWNPOUR: it is the rate of Adagrad, which adagrad="),
        (choros.Ensemble(window=4), {}, "window has no effect on Ensemble: its workers never exchange; remove it."),
        (choros.Single(window=4), {"workers": None}, "window has no effect on Single: its workers never exchange"),
        ("single", {}, "workers has no effect on Trainer: Single has one worker; remove it."),
        ("aeasgd", {"profile_batches": (3, 6)}, "profile_batches has no effect on Trainer: no directory is given by"),
        ("aeasgd", {"launcher": choros.Ssh("n1:2"), "devices": "gpu"}, "devices has no effect on Trainer: the ranks"),
    ],
)
def test_an_argument_without_effect_is_warned_of_once(algorithm, how, output, model):
    with pytest.warns(UserWarning, match="has no effect on") as warned:
        choros.Trainer(model, algorithm, **{"workers": 2} | how)
    assert [str(warning.message)[: len(output)] for warning in warned] == [output]
    assert warned[0].filename == __file__
    choros.Trainer(model, algorithm, **{"workers": 2} | how)  # a second warning would be an error


def test_settings_of_workers_beside_a_pool_are_warned_of(model):
    pool = choros.WorkerPool(2)
    with pytest.warns(UserWarning, match=r"^threads, bind, echo, devices have no effect on Trainer: .*; remove them\."):
        choros.Trainer(model, pool=pool, threads=1, bind=False, echo=False, devices="cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_settings_of_workers_in_a_job_are_warned_of_by_one_rank(rank, model, monkeypatch, recwarn):
    variables = {"CHOROS_RANK": rank, "CHOROS_SIZE": 2, "CHOROS_LOCAL_RANK": rank, "CHOROS_LOCAL_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("choros.trainer.choose_device", lambda place: None)
    monkeypatch.setattr("choros.trainer.prepare_rank", lambda place: None)
    if rank:
        choros.Trainer(model, threads=1)
        return
    with pytest.warns(UserWarning, match="^threads has no effect on Trainer: this process is a rank of a job that"):
        choros.Trainer(model, threads=1)


def test_a_transport_that_does_not_exist_is_refused_outside_of_a_job_too(model, monkeypatch):
    monkeypatch.setenv("CHOROS_COMM", "mip")
    with pytest.raises(InvalidInputError, match=r"CHOROS_COMM='mip' is none of: shared, mpi, tcp, torch, jax.* Unset"):
        choros.Trainer(model, workers=2)
    with pytest.raises(InvalidInputError, match="CHOROS_COMM='mip' is none of"):
        choros.shard(np.zeros((4, 2)), global_batch_size=2)


@pytest.mark.parametrize("name", ["tcp", "torch", "jax"])
def test_a_transport_that_local_workers_do_not_use_is_logged_once(name, model, monkeypatch, caplog):
    monkeypatch.setenv("CHOROS_COMM", name)
    unused_arguments._log_local.cache_clear()
    for _ in range(2):
        choros.Trainer(model, workers=2)
    (line,) = [record.getMessage() for record in caplog.records if "CHOROS_COMM" in record.getMessage()]
    assert line.startswith(f"CHOROS_COMM={name} has no effect on the workers of a Trainer on this machine")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("kind", Algorithm.__subclasses__())
def test_defaults_are_not_warned_of(kind):
    assert kind().unused() == {}
    assert choros.DOWNPOUR(adagrad=True, gamma=0.5).unused() == {}
