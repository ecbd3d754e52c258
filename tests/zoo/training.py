"""Ways of training: precision, adaptation, optimizers, weights, own steps."""

import keras
from keras import layers, ops
from tests.zoo.table import compiled, normal, weights, whole, zoo


def mlp(classes=3, **dense):
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu", **dense), layers.Dense(classes, activation="softmax")]
    )


def mlp_under(policy):
    """The same, of layers with this dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return mlp()
    finally:
        keras.config.set_dtype_policy(before)


@zoo("precision")
def mixed_precision():
    """mixed_bfloat16: layers compute in 16 bits, and weights have 32."""
    return compiled(mlp_under("mixed_bfloat16"), keras.optimizers.SGD(0.05)), normal(6), whole(3), weights()


@zoo("precision")
def mixed_float16_loss_scaling():
    """mixed_float16 with a LossScaleOptimizer, from a scale that no share of a batch overflows."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=1024.0)
    return compiled(mlp_under("mixed_float16"), optimizer), normal(6), whole(3), weights()


@zoo("precision")
def mixed_float16():
    """mixed_float16 with the initial scale of Keras, 32768: the same steps are skipped as in one process."""
    return compiled(mlp_under("mixed_float16"), keras.optimizers.SGD(0.05)), normal(6), whole(3), weights()


def adapted(quantise=None):
    model = mlp()
    if quantise:
        model.quantize(quantise)
    model.layers[0].enable_lora(rank=2)
    return model


@zoo("adaptation", fast=True)
def lora():
    """A Dense layer with LoRA: the kernel is frozen, two small factors train (parameter_efficient_finetuning)."""
    return compiled(adapted()), normal(6), whole(3), weights()


@zoo("adaptation")
def int8_lora():
    """A Dense layer with LoRA, in an int8-quantised model (QLoRA)."""
    return compiled(adapted("int8")), normal(6), whole(3), weights()


@zoo("adaptation")
def frozen_layers():
    """One frozen layer, and one weight without a gradient under AdamW."""
    model = mlp()
    model.layers[0].trainable = False
    adamw = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    return compiled(model, adamw), normal(6), whole(3), weights()


@zoo("adaptation")
def unused_head():
    """Two heads, a loss for one: plain Keras on PyTorch and TensorFlow does not change the other head."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(2, name="b")(hidden)})
    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.1), {"a": "mse", "b": None})
    return model, normal(6), {"a": normal(3, seed=1)}, None


@zoo("optimizer")
def cosine_schedule():
    """A warm-up and a cosine decay of the learning rate."""
    rate = keras.optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.1, warmup_steps=3)
    return compiled(mlp(), keras.optimizers.SGD(rate, momentum=0.9)), normal(6), whole(3), weights()


@zoo("optimizer", fast=True)
def moving_average():
    """use_ema: the weights become their moving average at the end."""
    return compiled(mlp(), keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9)), normal(6), whole(3), weights()


@zoo("optimizer")
def gradient_accumulation():
    """Three batches for each step."""
    return compiled(mlp(), keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3)), normal(6), whole(3), weights()


@zoo("optimizer")
def decay_and_clipping():
    """Weight decay, and clipping of the gradients by their global norm."""
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=1e-2, global_clipnorm=0.5)
    return compiled(mlp(), optimizer), normal(6), whole(3), weights()


@zoo("weights")
def class_weights():
    """class_weight with a last batch of two rows (imbalanced_classification)."""
    return compiled(mlp(2)), normal(6), whole(2), None


@zoo("weights")
def weighted_mean():
    """A loss that divides by the sum of the sample weights."""
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    return compiled(mlp(), loss=loss, weighted_metrics=["accuracy"]), normal(6), whole(3), weights()


@zoo("weights")
def summed_loss():
    """reduction="sum"."""
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    return compiled(mlp(), keras.optimizers.SGD(0.01), loss), normal(6), whole(3), weights()


@zoo("regularisation")
def regularisers():
    """L1 and L2 of kernels and biases, and a constraint."""
    how = dict(
        kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2), bias_regularizer="l2", kernel_constraint="max_norm"
    )
    return compiled(mlp(**how)), normal(6), whole(3), weights()


@zoo("regularisation", fast=True)
def activity_regulariser():
    """A penalty of activations, which Keras divides by the batch."""
    return compiled(mlp(activity_regularizer=keras.regularizers.L2(1e-2))), normal(6), whole(3), weights()


class MeanPenalty(layers.Layer):
    def call(self, x):
        self.add_loss(1e-1 * ops.mean(ops.square(x)))
        return x


class SumPenalty(layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * ops.sum(ops.square(x)))
        return x


def penalised(penalty):
    layer = penalty()
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layer, layers.Dense(3, activation="softmax")])


@zoo("regularisation")
def add_loss_mean():
    """add_loss of a mean over the batch."""
    return compiled(penalised(MeanPenalty)), normal(6), whole(3), weights()


@zoo("regularisation", "refused")
def add_loss_sum():
    """add_loss of a sum over the batch: no mean over rows."""
    return compiled(penalised(SumPenalty)), normal(6), whole(3), weights()


class Switch(layers.Layer):
    """Soft mixture of experts with a balancing loss of the batch's mean gates (switch_transformer)."""

    def __init__(self, experts, units, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.units = experts, units
        self.gate = layers.Dense(experts, activation="softmax")
        self.dense = [layers.Dense(units, activation="relu") for _ in range(experts)]

    def build(self, shape):
        for layer in (self.gate, *self.dense):
            layer.build(shape)

    def call(self, x):
        gates = self.gate(x)
        entropy = -ops.sum(gates * ops.log(gates + 1e-9), axis=-1)
        self.add_loss(1e-2 * ops.mean(entropy))
        return sum(gates[:, i : i + 1] * layer(x) for i, layer in enumerate(self.dense))

    def get_config(self):
        return {**super().get_config(), "experts": self.experts, "units": self.units}


@zoo("mixture of experts")
def mixture_of_experts():
    """A gate, three experts and an auxiliary loss of each row's gates."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(Switch(3, 5)(inputs)))
    return compiled(model), normal(6), whole(3), weights()


class Distance(keras.metrics.Metric):
    def __init__(self, name="distance", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], self.rows.dtype))

    def result(self):
        return self.total / self.rows


@zoo("own metrics")
def custom_metric():
    """A custom metric class with an additive state."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2)])
    return compiled(model, loss="mse", metrics=[Distance()]), normal(6), normal(2, seed=1), None


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


class SummedLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.05 * ops.sum(ops.square(y - y_pred))


def functional(kind):
    inputs = keras.Input((6,))
    model = kind(inputs, layers.Dense(2)(layers.Dense(8, "relu")(inputs)))
    model.compile(keras.optimizers.Adam(1e-2))
    return model


@zoo("own steps")
def compute_loss_mean():
    """compute_loss overridden, a mean over the rows."""
    return functional(OwnLoss), normal(6), normal(2, seed=1), None


@zoo("own steps", "refused")
def compute_loss_sum():
    """compute_loss overridden, a sum over the rows."""
    return functional(SummedLoss), normal(6), normal(2, seed=1), None


class Scaled(keras.Sequential):
    if keras.backend.backend() == "jax":

        def train_step(self, state, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            return super().train_step(state, (x * 2.0, y, sample_weight))
    else:

        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            return super().train_step((x * 2.0, y, sample_weight))


@zoo("own steps", fast=True)
def custom_train_step():
    """train_step overridden, around Keras' own."""
    model = Scaled([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(3, activation="softmax")])
    return compiled(model), normal(6), whole(3), weights()


class AfterUpdate(keras.Model):
    """``follow`` comes after the step of Keras, and so after the update of the weights."""

    if keras.backend.backend() == "jax":

        def train_step(self, state, data):
            logs, (trained, others, slots, metrics) = super().train_step(state, data)
            pairs = [
                *zip(self.trainable_variables, trained, strict=True),
                *zip(self.non_trainable_variables, others, strict=True),
            ]
            with keras.StatelessScope(state_mapping=pairs) as scope:
                self.follow()
            parts = (self.trainable_variables, self.non_trainable_variables)
            trained, others = ([scope.get_current_value(v) for v in part] for part in parts)
            return logs, (trained, others, slots, metrics)
    else:

        def train_step(self, data):
            logs = super().train_step(data)
            self.follow()
            return logs


class MeanTeacher(AfterUpdate):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        apart = ops.mean(ops.square(ops.stop_gradient(self.teacher(x, training=False)) - y_pred))
        return ops.mean(ops.square(y - y_pred)) + 0.5 * apart

    def follow(self):
        for value, weight in zip(self.teacher.weights, self.student.weights, strict=True):
            value.assign(0.9 * value + 0.1 * weight)


@zoo("own steps", fast=True)
def mean_teacher():
    """A teacher that is the moving average of its student: train_step moves it after the update."""
    student, teacher = (
        keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2)]) for _ in range(2)
    )
    model = MeanTeacher(student, teacher)
    model(normal(6)[:2])
    model.compile(keras.optimizers.Adam(1e-2))
    return model, normal(6), normal(2, seed=1), None


class Clipped(AfterUpdate):
    def follow(self):
        for variable in self.trainable_variables:
            variable.assign(ops.clip(variable, -0.3, 0.3))


@zoo("own steps")
def clipped_weights():
    """Weights that train_step clips after the update, as in the first WGAN."""
    inputs = keras.Input((6,))
    model = Clipped(inputs, layers.Dense(2)(layers.Dense(8, "relu")(inputs)))
    return compiled(model, loss="mse", metrics=()), normal(6), normal(2, seed=1), weights()


@zoo("own steps", {"jax": "equal", "torch": "-", "tensorflow": "equal"})
def several_steps_a_call():
    """steps_per_execution."""
    return compiled(mlp(), steps_per_execution=2), normal(6), whole(3), weights()
