"""Every public object has a ``repr`` that names its class and its arguments, without data, addresses and secrets."""

import importlib
import inspect
import pathlib
import types

import keras
import numpy as np
import pytest

import choros
import choros.hvd.elastic
from choros import cluster, data, hvd
from choros.errors import InvalidInputError
from choros.object_text import call_text
from choros.tools.check import CheckReport

MODULES = [
    "choros",
    "choros.algorithms",
    "choros.callbacks",
    "choros.cluster",
    "choros.data",
    "choros.hvd",
    "choros.hvd.callbacks",
    "choros.hvd.elastic",
    "choros.native",
    "choros.parallel",
    "choros.spark",
    "choros.spark.distkeras",
]


def public_values(name):
    """Return the public names of a module and their values."""
    if ".spark" in name:
        pytest.importorskip("pyspark", reason="pyspark is not installed")
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return {each: getattr(module, each) for each in module.__all__}
    named = {each: value for each, value in vars(module).items() if not each.startswith("_")}
    return {each: value for each, value in named.items() if getattr(value, "__module__", name) == name}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_class_has_a_repr(module):
    classes = {
        name: value
        for name, value in public_values(module).items()
        if inspect.isclass(value)
        and not isinstance(value, types.GenericAlias)
        and not issubclass(value, BaseException)
        and value.__module__.startswith("choros")  # an alias of a class of Python has the repr of that class
    }
    defaults = (object.__repr__, keras.callbacks.Callback.__repr__)
    assert not [name for name, kind in classes.items() if kind.__repr__ in defaults]


@pytest.mark.parametrize("module", MODULES)
def test_no_public_value_shows_an_address(module):
    """Functions do, as all of Python's."""
    values = {name: value for name, value in public_values(module).items() if not inspect.isroutine(value)}
    assert not [name for name, value in values.items() if " at 0x" in repr(value)]
    members = {
        f"{kind}.{name}": vars(value)[name]
        for kind, value in values.items()
        if inspect.isclass(value)
        for name in vars(value)
        if not name.startswith("_")
    }
    plain = {
        name: value
        for name, value in members.items()
        if not inspect.isroutine(value)
        and not inspect.isdatadescriptor(value)
        and not isinstance(value, staticmethod | classmethod)
    }
    assert not [name for name, value in plain.items() if " at 0x" in repr(value)]


def test_a_source_of_the_user_has_a_repr():
    class Rows(data.Source):
        pass

    assert repr(Rows()) == "<Rows>"
    assert repr(hvd.Compression()) == "Compression()"
    assert repr(hvd.Compression.fp16) == "Compression.fp16"


def test_the_pages_of_the_reference_are_all_walked():
    pages = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "api"
    marked = [
        line.removeprefix("<!-- generated: API of ").removesuffix(" -->")
        for page in pages.glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("<!-- generated: API of ")
    ]
    assert sorted(marked) == sorted(MODULES)


def twice(x):
    return 2 * x


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((4, 8), "float32"), np.zeros(4, "int32")


X, Y = np.zeros((96, 8), "float32"), np.zeros(96, "int32")
ARRAYS = data.ArraySource(X, Y)
ARRAYS_TEXT = "ArraySource(<ndarray (96, 8) float32>, <ndarray (96,) int32>)"
HALVING = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, end_epoch=3)
JOB = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (choros.callbacks.BatchTiming(verbose=0), "BatchTiming(warmup=1, verbose=0)"),
        (choros.callbacks.RunMetrics(), "RunMetrics()"),
        (choros.callbacks.SamplesPerSec(64), "SamplesPerSec(64, warmup=1, verbose=1)"),
        (choros.callbacks.Profile("p", (20, 22)), "Profile('p', profile_batches=(20, 22))"),
        (choros.callbacks.TensorBoardEmbedding("logs"), "TensorBoardEmbedding('logs', embeddings_freq=1)"),
        (choros.callbacks.BeforeTimeLimit("s", ["SIGUSR1"]), "BeforeTimeLimit('s', signals=('SIGUSR1',))"),
        (hvd.callbacks.BroadcastGlobalVariablesCallback(0), "BroadcastGlobalVariablesCallback(0)"),
        (hvd.callbacks.MetricAverageCallback(), "MetricAverageCallback(weighted=True)"),
        (
            hvd.callbacks.BestModelCheckpoint(filepath="best.keras"),
            "BestModelCheckpoint(monitor='val_loss', mode='auto', save_freq='epoch', save_weights_only=False, "
            "filepath='best.keras')",
        ),
        (
            HALVING,
            "LearningRateScheduleCallback(0.1, 0.5, start_epoch=0, end_epoch=3, staircase=True, "
            "momentum_correction=True)",
        ),
        (
            hvd.callbacks.LearningRateWarmupCallback(0.1),
            "LearningRateWarmupCallback(0.1, warmup_epochs=5, momentum_correction=True, verbose=0)",
        ),
        (
            hvd.callbacks.ProfileCallback("p", 20, 3, ranks=[1]),
            "ProfileCallback('p', first_step=20, steps=3, ranks=[1])",
        ),
        (hvd.elastic.ObjectState(epoch=3, x=X), "ObjectState(epoch=3, x=<ndarray (96, 8) float32>)"),
        (
            hvd.callbacks.CommitStateCallback(hvd.elastic.ObjectState(epoch=3)),
            "CommitStateCallback(ObjectState(epoch=3), batches_per_commit=1)",
        ),
        (
            hvd.callbacks.UpdateBatchStateCallback(hvd.elastic.ObjectState(batch=0)),
            "UpdateBatchStateCallback(ObjectState(batch=0))",
        ),
        (
            hvd.callbacks.UpdateEpochStateCallback(hvd.elastic.ObjectState(epoch=3)),
            "UpdateEpochStateCallback(ObjectState(epoch=3))",
        ),
        (ARRAYS, ARRAYS_TEXT),
        (
            data.ArraySource({"a": X}, Y, Y),
            "ArraySource({'a': <ndarray (96, 8) float32>}, <ndarray (96,) int32>, <ndarray (96,) int32>)",
        ),
        (data.PartitionedSource(ARRAYS, [96, 4], None), f"PartitionedSource({ARRAYS_TEXT}, [96, 4])"),
        (data.PrefetchSource(ARRAYS, 2, twice), f"PrefetchSource({ARRAYS_TEXT}, depth=2, augment=twice)"),
        (data.PyDatasetSource(Batches()), "PyDatasetSource(<Batches>)"),
        (data.StreamSource(iter([X])), "StreamSource(<list_iterator>)"),
        (data.prefetch((X, Y), augment=twice), "<choros.prefetch of (ndarray, ndarray, None), depth=2, augment=twice>"),
        (
            cluster.SlurmClusterParser(2, network="ib", environ={**JOB, "CHOROS_SECRET": "abc"}),
            "SlurmClusterParser(num_param_servers=2, starting_port=2300, network='ib')",
        ),
        (cluster.ClusterParser(environ={}), "ClusterParser(num_param_servers=-1, starting_port=2300)"),
    ],
    ids=lambda value: value.partition("(")[0] if isinstance(value, str) else "",
)
def test_an_object_shows_its_arguments(made, text):
    assert repr(made) == text


def test_a_state_shows_its_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    assert repr(hvd.elastic.KerasState(model, epoch=3)) == "KerasState(<Sequential name=small, built=True>, epoch=3)"


def test_a_subclass_of_a_callback_shows_its_own_name():
    kind = type("Timed", (choros.callbacks.BatchTiming,), {})
    assert repr(kind()) == "Timed(warmup=1, verbose=1)"


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="ModelParallel is for JAX")
def test_divided_weights_show_their_layout():
    made = choros.native.ModelParallel({"wide/kernel": (None, "model")}, seed=1)
    assert repr(made) == "ModelParallel({'wide/kernel': (None, 'model')}, seed=1)"


def test_a_token_in_the_url_of_spark_is_not_shown():
    made = choros.Spark("sc://head:15002/;token=abc;user_id=me", restarts=2, spark_ssl_keyPassword="abc")
    assert repr(made) == "Spark('sc://head:15002/;...', restarts=2)"
    assert repr(choros.Spark("local[2]")) == "Spark('local[2]')"
    with pytest.raises(InvalidInputError) as refused:
        choros.Spark("sx://head:15002/;token=abc")
    assert "abc" not in str(refused.value)


def test_objects_of_dist_keras():
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    distkeras = importlib.import_module("choros.spark.distkeras")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
    predictor = "ModelPredictor(<Sequential name=small, built=True>, features_col='features', output_col='prediction')"
    assert repr(distkeras.ModelPredictor(model)) == predictor
    assert repr(distkeras.MinMaxTransformer(0, 255, 0.0, 1.0, "a", "b")) == (
        "MinMaxTransformer(0, 255, 0.0, 1.0, 'a', 'b', is_vector=True)"
    )
    assert repr(distkeras.ReshapeTransformer("a", "b", (28, 28, 1))) == "ReshapeTransformer('a', 'b', [28, 28, 1])"
    assert repr(distkeras.LabelVectorTransformer(3)) == "LabelVectorTransformer(3, 'label', 'label_vectorized')"
    assert repr(distkeras.LabelIndexTransformer(3)) == (
        "LabelIndexTransformer(3, 'prediction', default_index=0, activation_threshold=0.55)"
    )


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the tape is for TensorFlow")
def test_the_distributed_tape():
    hvd.init()
    tape = hvd.DistributedGradientTape(importlib.import_module("tensorflow").GradientTape())
    assert repr(tape) == "DistributedGradientTape(<GradientTape>)"


def test_a_report_of_a_check_shows_its_verdict():
    made = CheckReport("small", "jax", "AllReduce", 1, 16, 1, ())
    assert repr(made) == "<CheckReport of small on jax, AllReduce: equal, 0 runs>"
    assert str(made).startswith("small on jax, AllReduce: 1 row, 1 epoch, ")


def test_the_text_is_short():
    text = call_text(object(), "a" * 10_000, list(range(10_000)), dict.fromkeys(range(1000)), key=twice)
    assert len(text) < 500
    assert text.endswith("key=twice)")
