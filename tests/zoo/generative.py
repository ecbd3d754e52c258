"""Generative, contrastive and distilled models: most are classes made of other models."""

import keras
from keras import layers, ops
from tests.zoo.table import compiled, normal, uniform, weights, whole, zoo

BACKEND = keras.backend.backend()


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        self.add_loss(-0.05 * ops.mean(1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var)))
        epsilon = keras.random.normal(shape=ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


def encoder():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, Sampling()([layers.Dense(2)(x), layers.Dense(2)(x)]), name="encoder")


@zoo("generative", "inexact", fast=True)
def vae_functional():
    """A variational autoencoder as a functional model: the divergence by add_loss."""
    code = encoder()
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(6, "sigmoid")], name="decoder")
    model = keras.Model(code.input, decoder(code.output))
    x = uniform(6)
    return compiled(model, loss="mse", metrics=()), x, x, weights()


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder

    def call(self, inputs):
        return self.decoder(self.encoder(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.sum(ops.square(x - y_pred), axis=-1)) + sum(self.losses)


@zoo("generative", "inexact")
def vae():
    """A variational autoencoder of two models, which are arguments of its __init__ (vae)."""
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(6)])
    model = VAE(encoder(), decoder)
    model.compile(optimizer=keras.optimizers.Adam())
    return model, uniform(6), None, None


def generator():
    return keras.Sequential([keras.Input((3,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(6)])


def discriminator():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)])


class GAN(keras.Model):
    """Two models, two optimizers, an own compile (dcgan_overriding_train_step, custom_train_step_in_torch)."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        return self.discriminator(inputs)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(optimizer=d_optimizer)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def losses_of(self, real):
        rows = ops.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, self.latent_dim), seed=self.seed_generator))
        d = self.loss_fn(ops.ones((rows, 1)), self.discriminator(real))
        d += self.loss_fn(ops.zeros((rows, 1)), self.discriminator(fake))
        return d, self.loss_fn(ops.ones((rows, 1)), self.discriminator(fake))

    if BACKEND == "torch":

        def train_step(self, real):
            import torch

            real = real[0] if isinstance(real, (tuple, list)) else real
            for number, (net, optimizer) in enumerate(
                ((self.discriminator, self.d_optimizer), (self.generator, self.g_optimizer))
            ):
                self.zero_grad()
                loss = self.losses_of(real)[number]
                loss.backward()
                with torch.no_grad():
                    optimizer.apply([w.value.grad for w in net.trainable_weights], net.trainable_weights)
            return {"g_loss": loss}
    elif BACKEND == "tensorflow":

        def train_step(self, real):
            import tensorflow as tf

            real = real[0] if isinstance(real, (tuple, list)) else real
            for number, (net, optimizer) in enumerate(
                ((self.discriminator, self.d_optimizer), (self.generator, self.g_optimizer))
            ):
                with tf.GradientTape() as tape:
                    loss = self.losses_of(real)[number]
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, net.trainable_weights), net.trainable_weights, strict=True)
                )
            return {"g_loss": loss}


@zoo("generative", {"jax": "-", "torch": "refused", "tensorflow": "refused"})
def gan():
    """A generator and a discriminator, each with its optimizer."""
    model = GAN(discriminator(), generator(), 3)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-4), keras.optimizers.Adam(4e-4), loss)
    return model, normal(6), None, None


class WGAN(GAN):
    """Wasserstein losses with a penalty of the critic's gradients, by a finite difference of two points."""

    def losses_of(self, real):
        rows = ops.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, self.latent_dim), seed=self.seed_generator))
        alpha = keras.random.uniform((rows, 1), seed=self.seed_generator)
        between = real + alpha * (fake - real)
        step = 1e-2 * (fake - real)
        slope = (self.discriminator(between + step) - self.discriminator(between)) / 1e-2
        d = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real))
        return d + 10.0 * ops.mean(ops.square(ops.abs(slope) - 1.0)), -ops.mean(self.discriminator(fake))


@zoo("generative", {"jax": "-", "torch": "refused", "tensorflow": "refused"})
def wgan_gp():
    """A critic with a gradient penalty (wgan_gp)."""
    model = WGAN(discriminator(), generator(), 3)
    model.compile(keras.optimizers.Adam(2e-4, beta_1=0.5), keras.optimizers.Adam(2e-4, beta_1=0.5), None)
    return model, normal(6), None, None


def denoiser():
    image, variance = keras.Input((6,)), keras.Input((1,))
    x = layers.Concatenate()([image, layers.Dense(4, "swish")(variance)])
    x = layers.LayerNormalization()(layers.Dense(8, "swish")(x))
    return keras.Model([image, variance], layers.Dense(6, kernel_initializer="zeros")(x))


class DiffusionModel(keras.Model):
    """Noise is predicted; after the update a second network takes the moving average of the first one's weights."""

    ema = 0.9

    def __init__(self):
        super().__init__()
        self.network = denoiser()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def call(self, inputs):
        return self.network([inputs, 0 * inputs[:, :1]]) + 0 * self.ema_network([inputs, 0 * inputs[:, :1]])

    def noise_loss(self, images):
        rows = ops.shape(images)[0]
        noises = keras.random.normal((rows, 6), seed=self.seed_generator)
        angles = 0.1 + 1.3 * keras.random.uniform((rows, 1), seed=self.seed_generator)
        noisy = ops.cos(angles) * images + ops.sin(angles) * noises
        predicted = self.network([noisy, ops.sin(angles) ** 2], training=True)
        return ops.mean(ops.abs(noises - predicted)) if self.loss is None else self.loss(noises, predicted)

    if BACKEND == "jax":

        def test_step(self, state, data):
            trained, others, metrics = state
            pairs = [
                *zip(self.trainable_variables, trained, strict=True),
                *zip(self.non_trainable_variables, others, strict=True),
                *zip(self.metrics_variables, metrics, strict=True),
            ]
            with keras.StatelessScope(state_mapping=pairs) as scope:
                self.noise_loss_tracker.update_state(self.noise_loss(data[0]))
                logs = {metric.name: metric.result() for metric in self.metrics}
            parts = (self.trainable_variables, self.non_trainable_variables, self.metrics_variables)
            return logs, tuple([scope.get_current_value(v) for v in part] for part in parts)
    else:

        def test_step(self, data):
            images = data[0] if isinstance(data, (tuple, list)) else data
            self.noise_loss_tracker.update_state(self.noise_loss(images))
            return {metric.name: metric.result() for metric in self.metrics}

    def follow(self):
        for value, weight in zip(self.ema_network.weights, self.network.weights, strict=True):
            value.assign(self.ema * value + (1 - self.ema) * weight)

    if BACKEND == "torch":

        def train_step(self, data):
            import torch

            images = data[0] if isinstance(data, (tuple, list)) else data
            self.zero_grad()
            loss = self.noise_loss(images)
            loss.backward()
            weights = self.network.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
                self.follow()
            self.noise_loss_tracker.update_state(loss)
            return {metric.name: metric.result() for metric in self.metrics}
    elif BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            images = data[0] if isinstance(data, (tuple, list)) else data
            with tf.GradientTape() as tape:
                loss = self.noise_loss(images)
            weights = self.network.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.noise_loss_tracker.update_state(loss)
            self.follow()
            return {metric.name: metric.result() for metric in self.metrics}
    else:

        def train_step(self, state, data):
            import jax

            images = data[0] if isinstance(data, (tuple, list)) else data
            trained, others, slots, metrics = state

            def loss_of(trained):
                held = [
                    *zip(self.trainable_variables, trained, strict=True),
                    *zip(self.non_trainable_variables, others, strict=True),
                ]
                with keras.StatelessScope(state_mapping=held) as scope:
                    loss = self.noise_loss(images)
                return loss, [scope.get_current_value(variable) for variable in self.non_trainable_variables]

            (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
            trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
            held = [
                *zip(self.trainable_variables, trained, strict=True),
                *zip(self.non_trainable_variables, others, strict=True),
                *zip(self.metrics_variables, metrics, strict=True),
            ]
            with keras.StatelessScope(state_mapping=held) as scope:
                self.noise_loss_tracker.update_state(loss)
                self.follow()
                logs = {metric.name: metric.result() for metric in self.metrics}
            parts = (self.trainable_variables, self.non_trainable_variables, self.metrics_variables)
            trained, others, metrics = ([scope.get_current_value(v) for v in part] for part in parts)
            return logs, (trained, others, slots, metrics)


@zoo("generative", "inexact")
def diffusion():
    """Denoising; train_step averages the weights after the update; the loss is a mean (ddim)."""
    model = DiffusionModel()
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=1e-3))
    return model, normal(6), None, None


@zoo("generative", {"jax": "-", "torch": "-", "tensorflow": "refused"})
def ddim():
    """As diffusion, with the loss of the example: one mean error for each row, so the gradient is that of their sum."""
    model = DiffusionModel()
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=1e-3), loss=keras.losses.mean_absolute_error)
    return model, normal(6), None, None


@zoo("generative", {"jax": "-", "torch": "-", "tensorflow": "inexact"})
def ddim_declared():
    """As ddim, with ``loss_divisor = None``, which declares the loss as a sum over rows."""
    model, *data = ddim()
    model.loss_divisor = None
    return model, *data


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        soft = [ops.softmax(p / self.temperature, axis=1) for p in (teacher_pred, y_pred)]
        distillation_loss = self.distillation_loss_fn(*soft) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@zoo("distillation")
def distillation():
    """A student and a teacher, with an overridden compile (knowledge_distillation)."""
    teacher, student = (keras.Sequential([keras.Input((6,)), layers.Dense(n, "relu"), layers.Dense(3)]) for n in (9, 5))
    model = Distiller(student, teacher)
    model.compile(
        keras.optimizers.Adam(),
        [keras.metrics.SparseCategoricalAccuracy()],
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
    )
    return model, normal(6), whole(3), None


class ContrastiveModel(keras.Model):
    """SimCLR: two views of each row, which are told apart from all others of the batch."""

    def __init__(self, encoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.temperature = 0.1
        self.noise = layers.GaussianNoise(0.1, seed=1)

    def call(self, inputs):
        return self.encoder(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        first, other = (ops.normalize(self.encoder(self.noise(x, training=True)), axis=1) for _ in range(2))
        similarities = ops.matmul(first, ops.transpose(other)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        both = (similarities, ops.transpose(similarities))
        loss = keras.losses.sparse_categorical_crossentropy
        return sum(ops.mean(loss(labels, each, from_logits=True)) for each in both)


@zoo("contrastive", "refused")
def simclr():
    """semisupervised_simclr: a loss that compares the rows of a batch."""
    tower = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model = ContrastiveModel(tower)
    model.compile(optimizer=keras.optimizers.Adam())
    return model, normal(6), None, None


class SupervisedContrastiveLoss(keras.losses.Loss):
    def __init__(self, temperature=1, name=None, reduction="sum_over_batch_size"):
        super().__init__(name=name, reduction=reduction)
        self.temperature = temperature

    def call(self, labels, feature_vectors, sample_weight=None):
        vectors = ops.normalize(feature_vectors, axis=1)
        logits = ops.matmul(vectors, ops.transpose(vectors)) / self.temperature
        labels = ops.reshape(labels, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        return -ops.mean(ops.log_softmax(logits, axis=1) * same / ops.sum(same, axis=1, keepdims=True))

    def get_config(self):
        return {**super().get_config(), "temperature": self.temperature}


@zoo("contrastive", "refused", fast=True)
def supervised_contrastive():
    """A custom compiled loss that compares the rows of a batch (supervised-contrastive-learning)."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)])
    return compiled(model, loss=SupervisedContrastiveLoss(0.05), metrics=()), normal(6), whole(3), None


@zoo("contrastive", {"jax": "equal", "torch": "equal", "tensorflow": "equal"})
def triplet():
    """Anchor, positive and negative through one tower; the loss is an output (siamese_network)."""
    tower = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)], name="embedding")
    inputs = [keras.Input((6,), name=name) for name in ("anchor", "positive", "negative")]
    a, p, n = (tower(each) for each in inputs)
    margin = ops.maximum(
        ops.sum(ops.square(a - p), axis=1, keepdims=True) - ops.sum(ops.square(a - n), axis=1, keepdims=True) + 0.5, 0.0
    )
    model = compiled(keras.Model(inputs, margin), keras.optimizers.Adam(1e-2), mean_of_output, ())
    x = {name: normal(6, seed=i) for i, name in enumerate(("anchor", "positive", "negative"))}
    return model, x, 0 * normal(1), weights()


def mean_of_output(y_true, y_pred):
    return ops.mean(y_pred, axis=-1)


class Coupling(layers.Layer):
    """Scales and moves one half by the other; add_loss of the log-determinant's mean."""

    def __init__(self, flip=False, **kwargs):
        super().__init__(**kwargs)
        self.flip = flip
        self.net = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.net.build((None, 2))

    def call(self, x):
        saved, moved = (x[:, 2:], x[:, :2]) if self.flip else (x[:, :2], x[:, 2:])
        scale, shift = ops.split(self.net(saved), 2, axis=-1)
        self.add_loss(-ops.mean(ops.sum(scale, axis=-1)))
        moved = moved * ops.exp(scale) + shift
        return ops.concatenate([moved, saved] if self.flip else [saved, moved], axis=-1)

    def get_config(self):
        return {**super().get_config(), "flip": self.flip}


def likelihood(y_true, y_pred):
    return 0.5 * ops.sum(ops.square(y_pred), axis=-1)


@zoo("generative")
def normalizing_flow():
    """Coupling layers and a standard normal's likelihood (real_nvp)."""
    model = keras.Sequential([keras.Input((4,)), Coupling(), Coupling(True), Coupling()])
    x = normal(4)
    return compiled(model, loss=likelihood, metrics=()), x, x, None
