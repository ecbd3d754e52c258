"""Images, points and videos."""

import keras
from keras import layers, ops
from tests.zoo.table import compiled, normal, uniform, weights, whole, zoo


@zoo("vision", fast=True)
def convnet():
    """Convolutions, pooling and dropout: the first example of keras.io (mnist_convnet)."""
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(6, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4, activation="softmax"),
        ]
    )
    y = keras.utils.to_categorical(whole(4), 4)
    return compiled(model, loss="categorical_crossentropy"), uniform(12, 12, 1), y, weights()


@zoo("vision")
def convnet_batch_normalization():
    """Convolutions with batch normalisation before the activation (a small xception from scratch)."""
    inputs = keras.Input((10, 10, 3))
    x = layers.Rescaling(1.0 / 255)(inputs)
    for filters in (4, 6):
        x = layers.Conv2D(filters, 3, strides=2, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(1)(layers.Dropout(0.25)(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metrics = [keras.metrics.BinaryAccuracy(name="acc")]
    return compiled(model, loss=loss, metrics=metrics), 255 * uniform(10, 10, 3), whole(2, 1), weights()


@zoo("vision")
def resnet():
    """Residual blocks with projections and layer normalisation."""
    inputs = x = keras.Input((8, 8, 3))
    for filters in (4, 8):
        # Not a convolution of 1 x 1 with strides: in its backward pass PyTorch 2.13 (oneDNN) writes beyond an array on
        # a processor without AVX-512, also in plain Keras, and the process is aborted some time later.
        short = layers.Conv2D(filters, 1)(layers.AveragePooling2D(2)(x))
        x = layers.Conv2D(filters, 3, strides=2, padding="same")(x)
        x = layers.Activation("relu")(layers.GroupNormalization(2)(x))
        x = layers.add([layers.Conv2D(filters, 3, padding="same")(x), short])
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalMaxPooling2D()(x))
    sgd = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    return compiled(keras.Model(inputs, outputs), sgd), normal(8, 8, 3), whole(3), weights()


@zoo("vision")
def mobilenet():
    """Depthwise and separable convolutions with ReLU6."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False),
            layers.ReLU(6.0),
            layers.DepthwiseConv2D(3, padding="same", use_bias=False),
            layers.ReLU(6.0),
            layers.SeparableConv2D(8, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="softmax"),
        ]
    )
    rms = keras.optimizers.RMSprop(1e-2)
    metrics = [keras.metrics.SparseTopKCategoricalAccuracy(2)]
    return compiled(model, rms, metrics=metrics), normal(8, 8, 3), whole(5), weights()


@zoo("vision", {"jax": "equal", "torch": "library", "tensorflow": "equal"})
def unet():
    """Segmentation: a class for each pixel, transposed convolutions and skips."""
    inputs = keras.Input((8, 8, 3))
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    low = layers.Conv2D(6, 3, padding="same", activation="relu")(layers.MaxPooling2D(2)(first))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(low)
    up = layers.concatenate([up, first])
    outputs = layers.Conv2D(3, 1, activation="softmax")(up)
    return compiled(keras.Model(inputs, outputs)), normal(8, 8, 3), whole(3, 8, 8), None


@zoo("vision")
def convlstm():
    """The next frame of a video (conv_lstm)."""
    model = keras.Sequential(
        [
            keras.Input((3, 6, 6, 1)),
            layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True),
            layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    return (
        compiled(model, loss="binary_crossentropy", metrics=()),
        uniform(3, 6, 6, 1),
        uniform(3, 6, 6, 1, seed=1),
        None,
    )


@zoo("vision")
def super_resolution():
    """Sub-pixel convolutions (super_resolution_sub_pixel)."""
    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(8, 3, padding="same", activation="relu", kernel_initializer="orthogonal")(inputs)
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = layers.Reshape((6, 6, 2, 2, 1))(x)
    x = layers.Permute((1, 3, 2, 4, 5))(x)
    outputs = layers.Reshape((12, 12, 1))(x)
    return (
        compiled(keras.Model(inputs, outputs), loss="mse", metrics=()),
        uniform(6, 6, 1),
        uniform(12, 12, 1),
        None,
    )


@zoo("vision", {"jax": "equal", "torch": "library", "tensorflow": "equal"})
def denoising_autoencoder():
    """An autoencoder with noisy images as input (autoencoder)."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2, padding="same"),
            layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same"),
            layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )
    return compiled(model, loss="binary_crossentropy", metrics=()), uniform(8, 8, 1), uniform(8, 8, 1, seed=2), None


class OrthogonalRegularizer(keras.regularizers.Regularizer):
    def __init__(self, num_features, l2reg=0.001):
        self.num_features = num_features
        self.l2reg = l2reg

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.num_features, self.num_features))
        xxt = ops.tensordot(x, x, axes=(2, 2))
        xxt = ops.reshape(xxt, (-1, self.num_features, self.num_features))
        return ops.sum(self.l2reg * ops.square(xxt - ops.eye(self.num_features)))

    def get_config(self):
        return {"num_features": self.num_features, "l2reg": self.l2reg}


@zoo("vision")
def pointnet():
    """Point clouds with a learnt transform, whose regulariser is of an activation (pointnet)."""
    inputs = keras.Input((12, 3))
    x = layers.Conv1D(6, 1, activation="relu")(inputs)
    x = layers.GlobalMaxPooling1D()(x)
    transform = layers.Dense(9, kernel_initializer="zeros", kernel_regularizer=keras.regularizers.L2(1e-3))(x)
    transform = layers.Reshape((3, 3))(transform)
    x = layers.Dot(axes=(2, 1))([inputs, transform])
    x = layers.Conv1D(9, 1, activation="relu", kernel_regularizer=OrthogonalRegularizer(3))(x)
    outputs = layers.Dense(4, activation="softmax")(layers.GlobalMaxPooling1D()(x))
    return compiled(keras.Model(inputs, outputs)), normal(12, 3), whole(4), weights()


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        size = self.patch_size
        patches = ops.image.extract_patches(images, size=size)
        return ops.reshape(patches, (ops.shape(images)[0], -1, patches.shape[-1]))

    def get_config(self):
        config = super().get_config()
        config.update({"patch_size": self.patch_size})
        return config


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=projection_dim)
        self.position_embedding = layers.Embedding(input_dim=num_patches, output_dim=projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
        return self.projection(patch) + self.position_embedding(positions)

    def get_config(self):
        config = super().get_config()
        config.update({"num_patches": self.num_patches})
        return config


@zoo("vision")
def vision_transformer():
    """ViT: patches, attention, layers whose __init__ takes no name (image_classification_with_vision_transformer)."""
    inputs = keras.Input((8, 8, 3))
    encoded = PatchEncoder(4, 8)(Patches(4)(inputs))
    x = layers.LayerNormalization(epsilon=1e-6)(encoded)
    x = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x), encoded])
    x = layers.Dense(8, activation=keras.activations.gelu)(layers.LayerNormalization(epsilon=1e-6)(x))
    outputs = layers.Dense(3)(layers.Dropout(0.5)(layers.Flatten()(x)))
    adamw = keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), adamw, loss), uniform(8, 8, 3), whole(3), weights()


@zoo("vision")
def mlp_mixer():
    """Mixing over patches and over channels by transposition (mlp_image_classification)."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((4, -1))(layers.Conv2D(6, 4, strides=4)(inputs))
    y = layers.LayerNormalization()(x)
    y = layers.Permute((2, 1))(y)
    y = layers.Dense(4)(layers.Dense(8, activation="gelu")(y))
    x = layers.Add()([x, layers.Permute((2, 1))(y)])
    y = layers.Dense(6)(layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x)))
    x = layers.GlobalAveragePooling1D()(layers.Add()([x, y]))
    outputs = layers.Dense(3)(layers.Dropout(0.2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), loss=loss), normal(8, 8, 3), whole(3), weights()


@zoo("vision", "inexact")
def augmentation():
    """Random flips and rotations in the model (data_augmentation)."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(0.1),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return compiled(model), uniform(8, 8, 3), whole(3), weights()


@zoo("vision")
def transfer_learning():
    """A frozen base, called in inference mode, and a new head (transfer_learning)."""
    base = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()], name="base"
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    outputs = layers.Dense(1)(layers.Dropout(0.2)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), loss=loss, metrics=()), normal(8, 8, 3), whole(2, 1), weights()


@zoo("vision")
def siamese_contrastive():
    """Two images, one tower, a loss of each pair's distance (siamese_contrastive)."""
    tower_in = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="tanh")(tower_in)
    x = layers.AveragePooling2D(2)(x)
    tower = keras.Model(tower_in, layers.Dense(5, activation="tanh")(layers.Flatten()(x)))
    left, right = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    distance = layers.Lambda(euclidean_distance, output_shape=(1,))([tower(left), tower(right)])
    outputs = layers.Dense(1, activation="sigmoid")(distance)
    model = compiled(keras.Model([left, right], outputs), keras.optimizers.RMSprop(1e-3), contrastive_loss(margin=1))
    return model, [uniform(8, 8, 1), uniform(8, 8, 1, seed=1)], whole(2, 1).astype("float32"), None


def euclidean_distance(vects):
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


def contrastive_loss(margin=1):
    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - (y_pred), 0))
        return ops.mean((1 - y_true) * square_pred + (y_true) * margin_square)

    return contrastive_loss


@zoo("vision")
def ocr_ctc():
    """Text in images: recurrent layers over columns, and the CTC loss of Keras (captcha_ocr)."""
    inputs = keras.Input((12, 6, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Reshape((12, 24))(x)
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True, dropout=0.25))(x)
    model = keras.Model(inputs, layers.Dense(6)(x))
    return compiled(model, loss=keras.losses.CTC(), metrics=()), uniform(12, 6, 1), 1 + whole(5, 4), None
