"""A GAN with two optimizers, written as on keras.io: two networks, one ``train_step`` of the user's own."""

import os

import keras
import numpy as np
import pytest

import choros
from choros.data import make_source
from choros.errors import InexactLossError, InvalidInputError
from choros.training.checkpoint import Checkpoint

BACKEND = os.environ.get("KERAS_BACKEND", "jax")
BOTH = ("discriminator", "generator")
ALGORITHMS = {
    "localsgd": lambda: choros.LocalSGD(window=2),
    "averaging": choros.Averaging,
    "aeasgd": lambda: choros.AEASGD(window=2),
}


def first(data):
    return data[0] if isinstance(data, (tuple, list)) else data


@keras.saving.register_keras_serializable(package="test_gan")
class GAN(keras.Model):
    """A DCGAN of 4 x 4 images. ``compile`` gets the discriminator's optimizer; the generator's is made here.

    Args:
        held: how the model holds that one: as an "attribute", in a "list" or in a "dict".
        built: whether it is built at once; else its first step builds it, as in the examples of keras.io.
        average: ``use_ema`` of that one.
    """

    def __init__(self, latent=3, held="attribute", built=True, average=False, **how):
        super().__init__(**how)
        self.latent, self.held, self.noise = latent, held, keras.random.SeedGenerator(1337)
        self.at_once, self.average = built, average
        layers = keras.layers
        self.discriminator = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                layers.Conv2D(3, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="discriminator",
        )
        self.generator = keras.Sequential(
            [
                keras.Input((latent,)),
                layers.Dense(8),
                layers.Reshape((2, 2, 2)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ],
            name="generator",
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(2e-2, use_ema=average)
        if built:
            optimizer.build(self.generator.trainable_variables)
        self.second = {"attribute": optimizer, "list": [optimizer], "dict": {"g": optimizer}}[held]
        if keras.backend.backend() == "jax":
            self.g_slots = list(self.g_optimizer.variables)  # what a step on JAX changes is a variable of the model

    def get_config(self):
        values = {"latent": self.latent, "held": self.held, "built": self.at_once, "average": self.average}
        return {**super().get_config(), **values}

    def build(self, input_shape):
        self.built = True

    def call(self, images):
        return self.discriminator(images)

    @property
    def d_optimizer(self):
        return self.optimizer

    @property
    def g_optimizer(self):
        return self.second if self.held == "attribute" else self.second[0 if self.held == "list" else "g"]

    def d_loss(self, real, fake):
        ones = keras.ops.ones((keras.ops.shape(real)[0], 1))
        return self.loss_fn(ones, self.discriminator(real)) + self.loss_fn(0 * ones, self.discriminator(fake))

    def g_loss(self, fake):
        return self.loss_fn(keras.ops.ones((keras.ops.shape(fake)[0], 1)), self.discriminator(fake))

    def draw(self, real):
        return keras.random.normal((keras.ops.shape(real)[0], self.latent), seed=self.noise)

    if BACKEND == "torch":

        def train_step(self, data):
            import torch

            real = first(data)
            noise = self.draw(real)
            self.zero_grad()
            d_loss = self.d_loss(real, self.generator(noise).detach())
            d_loss.backward()
            weights = self.discriminator.trainable_weights
            with torch.no_grad():
                self.d_optimizer.apply([weight.value.grad for weight in weights], weights)
            self.zero_grad()
            g_loss = self.g_loss(self.generator(noise))
            g_loss.backward()
            weights = self.generator.trainable_weights
            with torch.no_grad():
                self.g_optimizer.apply([weight.value.grad for weight in weights], weights)
            return {"d_loss": d_loss, "g_loss": g_loss}

    elif BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            real = first(data)
            noise = self.draw(real)
            with tf.GradientTape() as tape:
                d_loss = self.d_loss(real, self.generator(noise))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                g_loss = self.g_loss(self.generator(noise))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
            return {"d_loss": d_loss, "g_loss": g_loss}

    else:

        def train_step(self, state, data):
            import jax

            trained, others, slots, metrics = state
            real, values = first(data), dict(zip(map(id, self.non_trainable_variables), others, strict=True))
            split = len(self.discriminator.trainable_variables)
            d_weights, g_weights = trained[:split], trained[split:]
            pairs = [(v, values[id(v)]) for v in self.non_trainable_variables]
            with keras.StatelessScope(pairs) as scope:
                noise = self.draw(real)
            values[id(self.noise.state)] = scope.get_current_value(self.noise.state)

            def run(network, weights, inputs):
                return network.stateless_call(weights, [], inputs)[0]

            def d_loss_of(weights):
                ones = keras.ops.ones((real.shape[0], 1))
                fake = run(self.generator, g_weights, noise)
                loss = self.loss_fn(ones, run(self.discriminator, weights, real))
                return loss + self.loss_fn(0 * ones, run(self.discriminator, weights, fake))

            d_loss, gradients = jax.value_and_grad(d_loss_of)(d_weights)
            zeros = [keras.ops.zeros_like(weight) for weight in g_weights]  # Keras builds it for all weights
            updated, slots = self.optimizer.stateless_apply(slots, [*gradients, *zeros], trained)
            d_weights = updated[:split]

            def g_loss_of(weights):
                fake = run(self.generator, weights, noise)
                return self.loss_fn(keras.ops.ones((real.shape[0], 1)), run(self.discriminator, d_weights, fake))

            g_loss, gradients = jax.value_and_grad(g_loss_of)(g_weights)
            saved = [values[id(v)] for v in self.g_slots]
            g_weights, saved = self.g_optimizer.stateless_apply(saved, gradients, g_weights)
            values.update(zip(map(id, self.g_slots), saved, strict=True))
            others = [values[id(v)] for v in self.non_trainable_variables]
            return {"d_loss": d_loss, "g_loss": g_loss}, ([*d_weights, *g_weights], others, slots, metrics)


def make(seed=0, **how):
    keras.utils.set_random_seed(seed)
    model = GAN(**how)
    model.compile(keras.optimizers.Adam(1e-2))
    return model


def make_plain(**how):
    """The same for Keras' own fit, which on TensorFlow builds the compiled optimizer for what its first step trains."""
    model = make(**how)
    model.optimizer.build(model.trainable_variables)
    return model


def images(rows=48, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 4, 4, 1)).astype("float32")


def weights(model, name):
    return [np.array(value) for value in getattr(model, name).get_weights()]


def slots(model):
    variables = [*model.optimizer.variables, *model.g_optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def train(algorithm, workers, pools, x):
    model = make()
    trainer = choros.Trainer(model, algorithm, workers=workers, pool=pools(workers))
    trainer.fit(x, batch_size=8 * workers, epochs=1, shuffle=False, verbose=0)
    return model


def rows_of(rank, name):
    """The numbers of the rows that a rank of two trains in ``train``, in its order."""
    how = {"batch_size": 16, "seed": 1, "epoch": 0, "shuffle": False, "synchronous": name not in ("aeasgd", "downpour")}
    batches = make_source(np.arange(48.0)).epoch(rank=rank, size=2, **how)
    return np.concatenate([np.asarray(batch.x).ravel() for batch in batches]).astype(int).tolist()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_workers_train_both_networks(name, pools):
    """Rows that rank 1 alone trains are other ones there, and both networks move."""
    x = images()
    other = x.copy()
    actual, all_rows = rows_of(1, name), [*rows_of(0, name), *rows_of(1, name)]
    assert sorted(all_rows) == list(range(48))
    assert len(actual) == 24
    other[actual] *= -3
    trained_model = make()
    trained, moved = (train(ALGORITHMS[name](), 2, pools, rows) for rows in (x, other))
    for network in BOTH:
        for model, reference in ((trained, trained_model), (moved, trained)):
            pairs = zip(weights(model, network), weights(reference, network), strict=True)
            assert max(np.abs(value - before).max() for value, before in pairs) > 1e-4


KINDS = [kind.__name__ for kind in choros.algorithms.ALL]
HOW = {"batch_size": 8, "shuffle": False, "verbose": 0}


def neutral(name):
    """The settings with which one worker is plain Keras, as in tests/laws/test_3_one_worker.py."""
    more = {"EASGD": {"alpha": 0.0}, "AEASGD": {"alpha": 0.0}, "EAMSGD": {"alpha": 0.0, "momentum": 0.0}}
    more["DiLoCo"] = {"outer_rate": 1.0, "outer_momentum": 0.0}
    return getattr(choros, name)(window=1, **more.get(name, {}))


def everything(model):
    return [*(value for name in BOTH for value in weights(model, name)), *slots(model)]


def close(result, expected, tolerance=2e-5):
    for value, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=tolerance, rtol=1e-4)


def equal(result, expected):
    for value, other in zip(result, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("name", KINDS)
def test_one_worker_is_plain_keras_over_two_fits(name, pools):
    """The elastic family without force leaves the center where it was, so its second fit begins there again."""
    ours, plain, x = make(), make_plain(), images()
    trainer = choros.Trainer(ours, neutral(name), workers=1, pool=pools(1))
    stays = issubclass(getattr(choros, name), choros.EASGD)
    for epochs in (2, 1)[: 1 if stays else 2]:
        trainer.fit(x, epochs=epochs, **HOW)
        plain.fit(x, epochs=epochs, **HOW)
        assert int(ours.g_optimizer.iterations) == int(plain.g_optimizer.iterations) > 0
        close(slots(ours), slots(plain))
        if not stays:
            close(everything(ours), everything(plain))


@pytest.mark.parametrize("name", ["localsgd", "averaging", "downpour", "ensemble"])
def test_each_worker_keeps_slots_of_its_own_and_rank_0s_come_back(name, pools):
    """Both optimizers' slots are those of a rank 0 that trained alone: no exchange comes before the end."""
    long = {"localsgd": choros.LocalSGD(window=100), "downpour": choros.DOWNPOUR(window=100)}
    model, x = make(), images()
    trainer = choros.Trainer(model, long.get(name, name), workers=2, pool=pools(2))
    trainer.fit(x, epochs=1, batch_size=16, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == int(model.g_optimizer.iterations) == 3
    if name == "ensemble":  # its rows are a shard that is drawn
        return
    single = make_plain()
    single.fit(x[rows_of(0, name)], epochs=1, **HOW)
    close(slots(model), slots(single))


class Fails(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["localsgd", "averaging"])
def test_killed_and_resumed_is_bit_equal(name, tmp_path):
    """The workers are killed in the second epoch; the last state is of its middle, or of the first one's end."""
    x = images()

    def fit(where=None, calls=(), **how):
        model = make()
        algorithm = choros.LocalSGD(window=3) if name == "localsgd" else "averaging"
        with choros.Trainer(model, algorithm, workers=2) as trainer:
            saved = None if where is None else Checkpoint(where, every=2)
            trainer.fit(x, epochs=3, batch_size=16, seed=3, verbose=0, callbacks=list(calls), checkpoint=saved, **how)
        return model

    uninterrupted = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, [Fails(1, 2)])
    equal(everything(fit(tmp_path, resume=True)), everything(uninterrupted))


def test_a_second_run_of_one_worker_is_bit_equal(pools, tmp_path):
    def fit(epochs, **how):
        model = make()
        trainer = choros.Trainer(model, choros.EASGD(window=2), workers=1, pool=pools(1))
        trainer.fit(images(), epochs=epochs, **how, **HOW)
        return model

    uninterrupted = fit(3)
    fit(1, checkpoint=tmp_path)
    equal(everything(fit(3, checkpoint=tmp_path, resume=True)), everything(uninterrupted))


def test_allreduce_refuses_before_a_worker_starts(children):
    for held, place in (("attribute", "second"), ("list", r"second\[0\]"), ("dict", r"second\['g'\]")):
        before = children()
        trainer = choros.Trainer(make(held=held), "allreduce", workers=2)
        with pytest.raises(InexactLossError, match=f"second optimizer, .{place}"):
            trainer.fit(images(), **HOW)
        assert children() <= before


@pytest.mark.skipif(BACKEND == "jax", reason="on JAX an optimizer that is not built cannot take a step")
@pytest.mark.parametrize("held", ["attribute", "list", "dict"])
def test_an_optimizer_that_the_first_step_builds(held, pools, tmp_path):
    """Building it takes no step, no random number and no running figure of the caller's model."""

    def fit(epochs, **how):
        model = make(held=held, built=False)
        trainer = choros.Trainer(model, choros.LocalSGD(window=1), workers=1, pool=pools(1))
        trainer.fit(images(), epochs=epochs, **how, **HOW)
        return model

    uninterrupted, plain = fit(2), make_plain(held=held, built=False)
    plain.fit(images(), epochs=2, **HOW)
    assert int(uninterrupted.g_optimizer.iterations) == int(plain.g_optimizer.iterations) == 12
    close(everything(uninterrupted), everything(plain))
    fit(1, checkpoint=tmp_path)
    equal(everything(fit(2, checkpoint=tmp_path, resume=True)), everything(uninterrupted))


def test_averages_of_a_second_optimizer_are_refused_by_name(children):
    before = children()
    for name in ("localsgd", "aeasgd"):
        with pytest.raises(InvalidInputError, match=r"'second'.*use_ema"):
            choros.Trainer(make(average=True), name, workers=2).fit(images(), **HOW)
    assert children() <= before


class Slower(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.g_optimizer.learning_rate = 0.0


def test_a_callback_changes_the_second_rate(pools):
    """With a rate of 0 the generator stays from the second epoch on, and Keras' own fit does the same."""
    models = [make(), make_plain()]
    trainer = choros.Trainer(models[0], choros.LocalSGD(window=1), workers=1, pool=pools(1))
    trainer.fit(images(), epochs=3, callbacks=[Slower()], **HOW)
    models[1].fit(images(), epochs=1, callbacks=[Slower()], **HOW)
    models[1].fit(images(), epochs=2, callbacks=[Slower()], **HOW)
    close(*map(everything, models))
    with pytest.raises(InvalidInputError, match="learning rate of a second optimizer"):
        choros.Trainer(make(), choros.DOWNPOUR(window=1), workers=2, pool=pools(2)).fit(
            images(), epochs=3, callbacks=[Slower()], **HOW
        )
