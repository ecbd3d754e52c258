"""Sequences: text, audio, time series."""

import keras
import numpy as np
from keras import layers, ops
from tests.zoo.table import compiled, normal, weights, whole, zoo


@zoo("text")
def lstm_bidirectional():
    """Two bidirectional LSTMs over an embedding (bidirectional_lstm_imdb)."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, 6)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, sgd(), "binary_crossentropy"), whole(20, 7), whole(2, 1), weights()


def sgd(rate=0.1):
    """Of models with an Embedding: TensorFlow's Adam treats rows that repeat in a batch in its own, sparse way."""
    return keras.optimizers.SGD(rate, momentum=0.9)


@zoo("text")
def gru_masked():
    """Padded sequences with a mask, a label for each token."""
    x = 1 + whole(19, 7)
    for row, length in enumerate(np.random.default_rng(1).integers(2, 8, len(x))):
        x[row, length:] = 0
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.GRU(5, return_sequences=True),
            layers.Dense(4, activation="softmax"),
        ]
    )
    return compiled(model, sgd(), weighted_metrics=["accuracy"], metrics=()), x, whole(4, 7), None


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        attn_output = self.dropout1(self.att(inputs, inputs))
        out1 = self.layernorm1(inputs + attn_output)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


@zoo("text")
def transformer_classifier():
    """Layers without get_config (text_classification_with_transformer)."""
    inputs = keras.Input((6,))
    x = TransformerBlock(8, 2, 8)(TokenAndPositionEmbedding(6, 20, 8)(inputs))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    return compiled(model, sgd()), whole(20, 6), whole(2), weights()


@zoo("time series")
def transformer_timeseries():
    """Attention and convolutions with Keras' own layers, dropout inside of attention (timeseries_transformer)."""
    # Keras' example has one feature. A LayerNormalization of it is constant: the gradient of gamma is rounding alone.
    inputs = x = keras.Input((8, 3))
    for _ in range(2):
        attended = layers.MultiHeadAttention(key_dim=4, num_heads=2, dropout=0.25)(x, x)
        attended = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.25)(attended))
        res = attended + x
        y = layers.Conv1D(4, 1, activation="relu")(res)
        y = layers.Conv1D(3, 1)(layers.Dropout(0.25)(y))
        x = layers.LayerNormalization(epsilon=1e-6)(y) + res
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    x = layers.Dropout(0.4)(layers.Dense(8, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    return compiled(model), normal(8, 3), whole(2), weights()


@zoo("text")
def seq2seq():
    """A decoder that starts from the encoder's state, one-hot characters (lstm_seq2seq)."""
    encoder_inputs = keras.Input((None, 5))
    _, h, c = layers.LSTM(6, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, 4))
    decoded, _, _ = layers.LSTM(6, return_sequences=True, return_state=True)(decoder_inputs, initial_state=[h, c])
    outputs = layers.Dense(4, activation="softmax")(decoded)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    hot = keras.utils.to_categorical
    x = [hot(whole(5, 6), 5), hot(whole(4, 5), 4)]
    rms = keras.optimizers.RMSprop(1e-2)
    return compiled(model, rms, "categorical_crossentropy"), x, hot(whole(4, 5, seed=2), 4), None


@zoo("text")
def attention():
    """Queries over a sequence of keys by Attention and AdditiveAttention."""
    query, value = keras.Input((4, 6)), keras.Input((5, 6))
    layer = layers.Attention(use_scale=True)([query, value])
    other = layers.AdditiveAttention()([query, value])
    pooled = layers.GlobalAveragePooling1D()(layers.Concatenate()([layer, other]))
    model = keras.Model([query, value], layers.Dense(3, activation="softmax")(pooled))
    return compiled(model), [normal(4, 6), normal(5, 6, seed=1)], whole(3), weights()


@zoo("text")
def masked_language_model():
    """A class for each token, and sample weights that are 1 at masked tokens (masked_language_modeling)."""
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(20, 8)(inputs)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(attended))
    model = keras.Model(inputs, layers.Dense(20, activation="softmax")(x))
    masked = (np.random.default_rng(5).uniform(size=(42, 6)) < 0.3).astype("float32")
    return compiled(model, sgd(), metrics=(), weighted_metrics=["accuracy"]), whole(20, 6), whole(20, 6, seed=3), masked


@zoo("audio")
def conv1d_raw_audio():
    """Residual convolutions over raw sound (speaker_recognition)."""
    inputs = x = keras.Input((32, 1))
    for filters in (2, 4):
        short = layers.Conv1D(filters, 1, padding="same")(x)
        x = layers.Activation("relu")(layers.Conv1D(filters, 3, padding="same")(x))
        x = layers.Conv1D(filters, 3, padding="same")(x)
        x = layers.MaxPool1D(2, strides=2)(layers.Activation("relu")(layers.Add()([x, short])))
    x = layers.Flatten()(layers.AveragePooling1D(3, strides=3)(x))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    return compiled(model), normal(32, 1), whole(3), weights()


@zoo("time series")
def weather_forecast():
    """An LSTM on standardised series, sequences first (timeseries_weather_forecasting)."""
    inputs = keras.Input((10, 4))
    norm = layers.Normalization()
    norm.adapt(normal(10, 4))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(6)(norm(inputs))))
    return compiled(model, loss="mse", metrics=("mae",)), normal(10, 4), normal(1, seed=1), weights()


@zoo("text")
def simple_rnn():
    """SimpleRNN with recurrent dropout and a regulariser of its recurrent kernel."""
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            layers.SimpleRNN(5, recurrent_dropout=0.2, recurrent_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return compiled(model), normal(6, 3), whole(3), weights()
