"""Constructors and functions refuse values of another type in one sentence: what was given, and what to give."""

import importlib.util
import pathlib

import keras
import numpy as np
import pytest

import choros
import choros.hvd.elastic
from choros import callbacks, cluster, data, hvd, parallel
from choros.errors import InvalidInputError

TYPES = [3, -1, "", None, float("nan"), [], object(), True, {}]
PATHS = "give a path, such as"
FLAG = "give True or False"
STATE = choros.hvd.elastic.ObjectState(epoch=0, batch=0)
ib, X = hvd.callbacks, np.zeros((4, 2), "float32")


def trainer(**how):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return choros.Trainer(model, **{"workers": 2, **how})


def optimizer(**how):
    hvd.init()
    return hvd.DistributedOptimizer(keras.optimizers.SGD(), **how)


def first(timeout):
    with choros.rank_zero_first(timeout):
        raise AssertionError("the block has run")


@pytest.mark.parametrize(
    ("make", "name", "message", "valid"),
    [
        (trainer, "bind", FLAG, ()),
        (trainer, "echo", FLAG, ()),
        (trainer, "strict", FLAG, ()),
        (trainer, "network", "give an interface", (None, "")),
        (trainer, "pool", "give a choros.WorkerPool", (None,)),
        (trainer, "executor", "methods of an Executor", (None,)),
        (trainer, "profile", PATHS, (None,)),
        (lambda steps: trainer(profile="p", profile_batches=steps), "profile_batches", "give a first step", ()),
        (choros.WorkerPool, "backend", "give 'jax', 'torch' or 'tensorflow'", (None,)),
        (choros.WorkerPool, "bind", FLAG, ()),
        (choros.WorkerPool, "echo", FLAG, ()),
        (choros.Checkpoint, "directory", PATHS, ()),
        (lambda signals: choros.Checkpoint("state", signals=signals), "signals", "give a list of names", ([], {})),
        (choros.Ssh, "hosts", "give one text of the form", ()),
        (lambda command: choros.Ssh("n1:2", command), "command", "give the ssh program", ()),
        (choros.Srun, "hosts", "give one text of the form", (None, "")),
        (choros.Mpiexec, "hosts", "give one text of the form", (None, "")),
        (choros.Mpiexec, "program", "give a name or path", ()),
        (choros.Ray, "cores", "1 or more", (3,)),
        (choros.Ray, "gpus", "0 or more", (3,)),
        (choros.Ray, "address", "give host:port", ("",)),
        (choros.Ray, "strategy", "give one of PACK", ()),
        (choros.Ray, "timeout", "a number of seconds above 0", (3,)),
        (choros.Spark, "where", "give a SparkSession", (None,)),
        (choros.Spark, "restarts", "0 or more", (3,)),
        (lambda threads: choros.run(len, num_proc=1, threads=threads), "threads", "1 or more", (3, None)),
        (lambda bind: choros.run(len, num_proc=1, bind=bind), "bind", FLAG, (True,)),
        (lambda file: choros.run(len, output_filename=file), "output_filename", PATHS, (None,)),
        (cluster.read_hostfile, "path", PATHS, ()),
        (cluster.expand_hosts, "text", "give one such as", ("",)),
        (cluster.expand_tasks, "text", "give one such as|count such as", ()),
        (cluster.ClusterParser, "num_param_servers", "-1 or more", (3, -1)),
        (cluster.ClusterParser, "starting_port", "0 or more", (3,)),
        (cluster.ClusterParser, "environ", "give a dict", (None, {})),
        (cluster.ClusterParser, "network", "give a domain", (None, "")),
        (callbacks.BatchTiming, "warmup", "of steps, 0 or more", (3,)),
        (callbacks.SamplesPerSec, "batch_size", "of rows, 1 or more", (3,)),
        (callbacks.Profile, "directory", PATHS, ()),
        (lambda steps: callbacks.Profile("p", steps), "profile_batches", "give a first step", ()),
        (callbacks.TensorBoardEmbedding, "log_dir", PATHS, ()),
        (callbacks.TensorBoardEmbedding, "embeddings_freq", "of epochs, 1 or more", (3,)),
        (callbacks.TensorBoardEmbedding, "embeddings_layer_names", "give a list of names", (None, [], {})),
        (callbacks.TensorBoardEmbedding, "embeddings_metadata", PATHS, (None, {})),
        (callbacks.BeforeTimeLimit, "directory", PATHS, ()),
        (lambda given: callbacks.BeforeTimeLimit("s", given), "signals", "give a list of names", (None, [], {})),
        (ib.BroadcastGlobalVariablesCallback, "root_rank", "0 or more", (3,)),
        (ib.MetricAverageCallback, "weighted", FLAG, ()),
        (ib.BestModelCheckpoint, "filepath", PATHS, (None,)),
        (lambda rate: ib.LearningRateScheduleCallback(rate, 0.5), "initial_lr", "the learning rate", (3,)),
        (lambda m: ib.LearningRateScheduleCallback(0.1, m), "multiplier", "or a function of the epoch", (3,)),
        (ib.LearningRateWarmupCallback, "initial_lr", "the learning rate", (3,)),
        (lambda w: ib.LearningRateWarmupCallback(0.1, w), "warmup_epochs", "a finite number", (3,)),
        (lambda n: ib.ProfileCallback("p", first_step=n), "first_step", "0 or more", (3,)),
        (lambda n: ib.ProfileCallback("p", steps=n), "steps", "1 or more", (3,)),
        (lambda ranks: ib.ProfileCallback("p", ranks=ranks), "ranks", "give a list of ranks", ("", [], {})),
        (lambda n: ib.CommitStateCallback(STATE, n), "batches_per_commit", "1 or more", (3,)),
        (ib.CommitStateCallback, "state", "give a state", ()),
        (ib.UpdateBatchStateCallback, "state", "give a state", ()),
        (ib.UpdateEpochStateCallback, "state", "give a state", ()),
        (data.StreamSource, "stream", "give an iterable", ([],)),
        (lambda floatx: data.StreamSource([], floatx=floatx), "floatx", "give 'float16'", ()),
        (lambda floatx: data.ArraySource(X, floatx=floatx), "floatx", "give 'float16'", ()),
        (lambda block: data.ArraySource(X, block=block), "block", "0 or more", (3, None)),
        (hvd.ProcessSet, "ranks", "give", ()),
        (lambda ranks: hvd.ProcessSet([ranks]), "ranks", "give a whole number, 0 or more", (3,)),
        (optimizer, "process_set", "give a hvd.ProcessSet", (None,)),
        (optimizer, "gradient_predivide_factor", "give a finite number above 0", (3,)),
        (optimizer, "backward_passes_per_step", "1 or more", (3,)),
        (optimizer, "op", "give hvd.Average|hvd.Average or hvd.Sum", (None,)),
        (parallel.make_parallel, "serial_model", "give a keras.Model", ()),
        (first, "timeout", "a number of seconds", (3,)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_values_of_another_type(make, name, message, valid, monkeypatch):
    def start(self, unfit=()):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(choros.WorkerPool, "start", start)
    by_name = make.__name__ != "<lambda>"
    for value in TYPES:
        if any(type(value) is type(each) and value == each for each in valid) or (value is True and message == FLAG):
            continue
        # Horovod's names raise a plain ValueError for some values.
        kind = ValueError if make in (optimizer, hvd.ProcessSet) else InvalidInputError
        with pytest.raises(kind, match=message) as refused:
            make(**{name: value}) if by_name else make(value)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 250


def test_what_counts_as_true_and_as_a_path():
    for value in (True, 1, np.True_, np.int64(1)):
        assert "Trainer" in repr(trainer(bind=value, strict=value))
    for value in (pathlib.Path("state"), "state", b"state"):
        assert repr(choros.Checkpoint(value)) == "Checkpoint('state', every='epoch', keep=3)"
    for value in (np.float32(0.5), keras.ops.convert_to_tensor(0.5)):
        assert ib.LearningRateScheduleCallback(value, 1.0).initial_lr == 0.5


def test_signals_that_no_process_can_catch():
    for make in (choros.Checkpoint, callbacks.BeforeTimeLimit):
        with pytest.raises(InvalidInputError, match="SIGKILL cannot be caught by a process"):
            make("state", signals=["SIGKILL"])


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed")
def test_a_session_of_spark_has_a_method_that_makes_frames():
    """``choros.Spark`` accepts objects with it, so that it need not import pyspark."""
    from pyspark.sql import SparkSession

    assert hasattr(SparkSession, "createDataFrame")
