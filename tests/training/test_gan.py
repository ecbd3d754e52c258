"""A GAN with two optimizers, written as on keras.io: two networks, one ``train_step`` of the user's own."""

import os

import keras
import numpy as np
import pytest

import choros
from choros.errors import NotExact

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
    """A DCGAN of 4 x 4 images. ``compile`` gets the discriminator's optimizer; the generator's is made here."""

    def __init__(self, latent=3, **how):
        super().__init__(**how)
        self.latent, self.noise = latent, keras.random.SeedGenerator(1337)
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
        self.g_optimizer = keras.optimizers.Adam(2e-2)
        self.g_optimizer.build(self.generator.trainable_variables)
        if keras.backend.backend() == "jax":
            self.g_slots = list(self.g_optimizer.variables)  # what a step on JAX changes is a variable of the model

    def get_config(self):
        return {**super().get_config(), "latent": self.latent}

    def build(self, input_shape):
        self.built = True

    def call(self, images):
        return self.discriminator(images)

    @property
    def d_optimizer(self):
        return self.optimizer

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
            kept = [values[id(v)] for v in self.g_slots]
            g_weights, kept = self.g_optimizer.stateless_apply(kept, gradients, g_weights)
            values.update(zip(map(id, self.g_slots), kept, strict=True))
            others = [values[id(v)] for v in self.non_trainable_variables]
            return {"d_loss": d_loss, "g_loss": g_loss}, ([*d_weights, *g_weights], others, slots, metrics)


def make(seed=0):
    keras.utils.set_random_seed(seed)
    model = GAN()
    model.compile(keras.optimizers.Adam(1e-2))
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_workers_train_both_networks(name, pools):
    """Half of each global batch is rank 1's, or the second half of all rows: other ones there, another result."""
    x = images()
    other = x.copy()
    (other[24:] if name == "aeasgd" else other.reshape(3, 2, 8, 4, 4, 1)[:, 1])[:] *= -3
    given = make()
    trained, moved = (train(ALGORITHMS[name](), 2, pools, rows) for rows in (x, other))
    for network in BOTH:
        for model, reference in ((trained, given), (moved, trained)):
            pairs = zip(weights(model, network), weights(reference, network), strict=True)
            assert max(np.abs(value - before).max() for value, before in pairs) > 1e-4


def test_allreduce_refuses_by_name(pools):
    with pytest.raises(NotExact, match="second optimizer, 'g_optimizer'"):
        train("allreduce", 2, pools, images())
