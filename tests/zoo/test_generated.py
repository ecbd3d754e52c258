"""Law 1 on models that hypothesis puts together: graphs, optimizers, losses, reductions, weights, batch sizes."""

import os

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers

import choros

BACKEND = os.environ["KERAS_BACKEND"]
PHASES = (Phase.explicit, Phase.generate)  # to find a smaller plan that fails takes minutes
HOW = {
    "deadline": None,
    "phases": PHASES,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
ROWS = 29

# By name, a function of the scale of the learning rate; other optimizers' steps do not grow with the gradient.
OPTIMIZERS = {
    "sgd": lambda scale: keras.optimizers.SGD(0.05 * scale, momentum=0.9, nesterov=True),
    "adam": lambda scale: keras.optimizers.Adam(1e-2, clipnorm=1.0),
    "adamw": lambda scale: keras.optimizers.AdamW(1e-2, weight_decay=1e-2, use_ema=True, ema_momentum=0.9),
    "rmsprop": lambda scale: keras.optimizers.RMSprop(1e-3, global_clipnorm=0.5),
    "accumulating": lambda scale: keras.optimizers.SGD(0.05 * scale, gradient_accumulation_steps=2),
    "schedule": lambda scale: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1 * scale, 2, 0.5)),
    "adagrad": lambda scale: keras.optimizers.Adagrad(1e-2),
    "clipvalue": lambda scale: keras.optimizers.SGD(0.02, clipvalue=0.05),
}
CLASSES = {
    "cce": lambda reduction: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
}
NUMBERS = {
    "mse": lambda reduction: keras.losses.MeanSquaredError(reduction=reduction),
    "huber": lambda reduction: keras.losses.Huber(delta=2.0, reduction=reduction),
    "logcosh": lambda reduction: keras.losses.LogCosh(reduction=reduction),
}
BLOCKS = ("dense", "shared", "residual", "conv", "layernorm", "batchnorm", "regularised", "dropout", "concatenate")


@st.composite
def plans(draw):
    """Draw the plan of a model as plain values, so that a failure prints it."""
    several = draw(st.booleans())
    reduction = (
        "sum_over_batch_size"
        if several
        else draw(st.sampled_from(("sum_over_batch_size", "sum", "mean_with_sample_weight")))
    )
    blocks = draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4))
    if reduction == "sum":  # which Choros refuses beside regularisers
        blocks = [block for block in blocks if block != "regularised"] or ["dense"]
    return {
        "embedding": draw(st.booleans()),
        "blocks": blocks,
        "several": several,
        "loss": draw(st.sampled_from((*CLASSES, *NUMBERS))),
        "reduction": reduction,
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "weighted": draw(st.booleans()),
        "batch": draw(st.sampled_from((5, 7, 8, 13))),
        "workers": draw(st.sampled_from((2, 3))),
        "seed": draw(st.integers(0, 99)),
    }


def made(plan):
    """The model of a plan, compiled, and its rows."""
    keras.utils.set_random_seed(plan["seed"])
    rng = np.random.default_rng(plan["seed"])
    inputs = {"a": keras.Input((6,), name="a")}
    data = {"a": rng.normal(size=(ROWS, 6)).astype("float32")}
    x = inputs["a"]
    if plan["embedding"]:
        inputs["b"] = keras.Input((3,), name="b", dtype="int32")
        data["b"] = rng.integers(0, 9, (ROWS, 3))
        x = layers.concatenate([x, layers.Flatten()(layers.Embedding(9, 2)(inputs["b"]))])
    x = layers.Dense(6)(x)
    shared = layers.Dense(6, activation="tanh", name="shared")
    for block in plan["blocks"]:
        x = grown(block, x, shared)
    classes = plan["loss"] in CLASSES
    heads = {"one": layers.Dense(4 if classes else 2, name="one")(x)}
    loss = {"one": {**CLASSES, **NUMBERS}[plan["loss"]](plan["reduction"])}
    y = {"one": rng.integers(0, 4, ROWS) if classes else rng.normal(size=(ROWS, 2)).astype("float32")}
    if plan["several"]:
        heads["two"] = layers.Dense(1, name="two")(x)
        loss["two"], y["two"] = "mae", rng.normal(size=(ROWS, 1)).astype("float32")
    model = keras.Model(inputs, heads)
    weighted = {name: ["mse" if name == "two" or not classes else "accuracy"] for name in heads}
    scale = 0.1 if plan["reduction"] == "sum" else 1.0  # else some trainings diverge, and rounding decides their values
    model.compile(OPTIMIZERS[plan["optimizer"]](scale), loss, weighted_metrics=weighted)
    weight = rng.uniform(0.5, 2, ROWS).astype("float32") if plan["weighted"] else None
    return model, data, y, weight


def grown(block, x, shared):
    """One more block on x, of the same shape."""
    if block == "dense":
        return layers.Dense(6, activation="gelu")(x)
    if block == "shared":
        return shared(shared(x))
    if block == "residual":
        return layers.add([x, layers.Dense(6, activation="relu")(x)])
    if block == "conv":
        y = layers.Conv1D(3, 3, padding="same", activation="tanh")(layers.Reshape((6, 1))(x))
        return layers.Dense(6)(layers.Flatten()(y))
    if block == "layernorm":
        return layers.LayerNormalization()(x)
    if block == "batchnorm":
        return layers.BatchNormalization()(x)
    if block == "regularised":
        return layers.Dense(6, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(1e-3))(x)
    if block == "dropout":
        return layers.Dropout(0.4)(x)
    return layers.Dense(6)(layers.concatenate([x, layers.multiply([x, x])]))


@settings(max_examples=3, **HOW)
@given(plan=plans())
def test_few_generated_models_are_plain_keras(pools, plan):
    is_plain_keras(pools, plan)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=12, **HOW)
@given(plan=plans())
def test_more_generated_models_are_plain_keras(pools, plan):
    is_plain_keras(pools, plan)


def is_plain_keras(pools, plan):
    if BACKEND == "tensorflow" and plan["embedding"]:  # TensorFlow's optimizers treat rows that repeat in their own way
        plan = {**plan, "optimizer": "schedule"}
    model, x, y, weight = made(plan)
    report = choros.check(
        model,
        x,
        y,
        weight,
        workers=(plan["workers"],),
        batch_size=plan["batch"],
        rows=ROWS,
        resume=False,
        pool=pools(3),
    )
    refused = "regularised" in plan["blocks"] and plan["reduction"] == "mean_with_sample_weight" and plan["weighted"]
    assert report.verdict == ("refused" if refused else "equal"), f"{plan}\n{report}"
