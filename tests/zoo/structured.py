"""Tables, recommenders, graphs."""

import keras
import numpy as np
from keras import layers, ops
from tests.zoo.table import compiled, normal, uniform, weights, whole, zoo
from tests.zoo.text import sgd


@zoo("recommender", fast=True)
def matrix_factorization():
    """Embeddings of users and items, their product and biases, L2 of the embeddings."""
    user, item = keras.Input((1,), name="user", dtype="int32"), keras.Input((1,), name="item", dtype="int32")
    l2 = keras.regularizers.L2(1e-4)
    u, v = (layers.Embedding(15, 4, embeddings_regularizer=l2)(i) for i in (user, item))
    bu, bv = (layers.Embedding(15, 1)(i) for i in (user, item))
    score = layers.Flatten()(layers.Add()([layers.Dot(axes=2)([u, v]), bu, bv]))
    model = keras.Model({"user": user, "item": item}, layers.Activation("sigmoid")(score))
    x = {"user": whole(15, 1), "item": whole(15, 1, seed=1)}
    return compiled(model, sgd(), "binary_crossentropy"), x, uniform(1), weights()


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.embedding_size = num_users, num_movies, embedding_size
        self.user_embedding = layers.Embedding(num_users, embedding_size, embeddings_initializer="he_normal")
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, embedding_size)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector, user_bias = self.user_embedding(inputs[:, 0]), self.user_bias(inputs[:, 0])
        movie_vector, movie_bias = self.movie_embedding(inputs[:, 1]), self.movie_bias(inputs[:, 1])
        dot = ops.sum(user_vector * movie_vector, axis=1, keepdims=True)
        return ops.sigmoid(dot + user_bias + movie_bias)

    def get_config(self):
        actual = {name: getattr(self, name) for name in ("num_users", "num_movies", "embedding_size")}
        return {**super().get_config(), **actual}


@zoo("recommender")
def recommender_subclassed():
    """A subclassed model of two columns (collaborative_filtering_for_movielens), with a get_config."""
    model = RecommenderNet(15, 12, 4)
    x = np.concatenate([whole(15, 1), whole(12, 1, seed=1)], axis=1)
    return compiled(model, sgd(), keras.losses.BinaryCrossentropy(), metrics=()), x, uniform(1), weights()


class PlainRecommender(keras.Model):
    def __init__(self, num_users):
        super().__init__()
        self.embed = layers.Embedding(num_users, 4)
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(ops.mean(self.embed(inputs), axis=1))


@zoo("recommender")
def recommender_without_config():
    """As recommender-subclassed, without a get_config, like the first example in keras.Model's documentation."""
    return compiled(PlainRecommender(15), sgd(), "mse", ()), whole(15, 2), uniform(1), weights()


class TwoTower(keras.Model):
    def __init__(self, query_model, candidate_model):
        super().__init__()
        self.query_model, self.candidate_model = query_model, candidate_model

    def call(self, inputs):
        query, candidate = self.query_model(inputs["query"]), self.candidate_model(inputs["candidate"])
        return ops.matmul(query, ops.transpose(candidate))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        labels = ops.arange(ops.shape(y_pred)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, y_pred, from_logits=True))


@zoo("recommender", "refused")
def two_tower_retrieval():
    """Towers as arguments of __init__, and a loss of each query against the batch's candidates (retrieval)."""
    towers = [keras.Sequential([keras.Input((4,)), layers.Dense(3)]) for _ in range(2)]
    model = TwoTower(*towers)
    model.compile(optimizer="adagrad")
    return model, {"query": normal(4), "candidate": normal(4, seed=1)}, None, None


@zoo("structured", fast=True)
def wide_and_deep():
    """A linear part and a deep part of the same features, dict inputs (wide_deep_cross_networks)."""
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "hours", "gain")}
    wide = layers.concatenate(list(inputs.values()))
    deep = wide
    for units in (8, 6):
        deep = layers.Dropout(0.1)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(deep))))
    outputs = layers.Dense(3, activation="softmax")(layers.concatenate([layers.BatchNormalization()(wide), deep]))
    x = {name: normal(1, seed=i) for i, name in enumerate(inputs)}
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    return compiled(keras.Model(inputs, outputs), metrics=metrics), x, whole(3), weights()


@zoo("structured")
def multi_input_and_output():
    """Three inputs, two outputs, a loss and a weight for each (the functional API's guide)."""
    title, body = (keras.Input((None,), name=name, dtype="int32") for name in ("title", "body"))
    tags = keras.Input((4,), name="tags")
    features = [layers.LSTM(4)(layers.Embedding(20, 5)(text)) for text in (title, body)]
    x = layers.concatenate([*features, tags])
    outputs = {"priority": layers.Dense(1, name="priority")(x), "department": layers.Dense(4, name="department")(x)}
    model = keras.Model([title, body, tags], outputs)
    loss = {
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(from_logits=True),
    }
    model.compile(sgd(), loss, loss_weights={"priority": 1.0, "department": 0.2}, metrics={"priority": ["mse"]})
    x = {"title": whole(20, 5), "body": whole(20, 7, seed=1), "tags": normal(4)}
    y = {"priority": whole(2, 1).astype("float32"), "department": keras.utils.to_categorical(whole(4), 4)}
    return model, x, y, weights()


@zoo("structured")
def preprocessing_layers():
    """Normalisation, categories and crossing in the model (structured_data_classification_from_scratch)."""
    age, kind = keras.Input((1,), name="age"), keras.Input((1,), name="kind", dtype="int64")
    norm = layers.Normalization()
    norm.adapt(normal(1))
    lookup = layers.CategoryEncoding(num_tokens=6, output_mode="one_hot")
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(layers.concatenate([norm(age), lookup(kind)])))
    model = keras.Model([age, kind], layers.Dense(1, activation="sigmoid")(x))
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    x = {"age": normal(1), "kind": whole(6, 1)}
    return compiled(model, loss="binary_crossentropy", metrics=metrics), x, whole(2, 1), weights()


@zoo("structured")
def tab_transformer():
    """Embedded categories through attention, together with numbers (tabtransformer)."""
    names = ["work", "school", "state"]
    inputs = {name: keras.Input((), name=name, dtype="int32") for name in names} | {
        "gain": keras.Input((1,), name="gain")
    }
    columns = [layers.Embedding(6, 8)(inputs[name]) for name in names]
    x = ops.stack(columns, axis=1)
    x += layers.Embedding(3, 8)(ops.arange(3))
    attended = layers.MultiHeadAttention(2, 8, dropout=0.2)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([attended, x]))
    x = layers.concatenate([layers.Flatten()(x), layers.LayerNormalization()(inputs["gain"])])
    x = layers.Dense(8, activation="selu")(layers.Dropout(0.2)(x))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    data = {name: whole(6, seed=i) for i, name in enumerate(names)} | {"gain": normal(1)}
    loss = keras.losses.BinaryCrossentropy()
    return compiled(model, sgd(), loss, [keras.metrics.BinaryAccuracy(name="accuracy")]), data, whole(2, 1), weights()


@zoo("structured")
def quantile_regression():
    """A custom loss for each row, and three quantiles."""

    def pinball(y_true, y_pred):
        quantiles = ops.convert_to_tensor([0.1, 0.5, 0.9])
        error = y_true - y_pred
        return ops.mean(ops.maximum(quantiles * error, (quantiles - 1) * error), axis=-1)

    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(3)])
    return compiled(model, loss=pinball, metrics=()), normal(5), normal(1, seed=1), weights()


@zoo("structured", fast=True)
def huber_regression():
    """A robust loss with a custom delta, which its get_config() leaves out."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    return (
        compiled(model, loss=keras.losses.Huber(delta=3.0), metrics=("mae",)),
        normal(5),
        9 * normal(1, seed=1),
        weights(),
    )


@zoo("structured", "refused")
def cosine_over_the_batch():
    """CosineSimilarity(axis=0) compares columns of the whole batch: no mean over rows."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    return compiled(model, loss=keras.losses.CosineSimilarity(axis=0), metrics=()), normal(5), normal(3, seed=1), None


class GraphConvLayer(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.ffn = layers.Dense(units, activation="gelu")
        self.update = layers.Dense(units)

    def build(self, shapes):
        self.ffn.build(shapes[0])
        self.update.build((*shapes[0][:-1], shapes[0][-1] + self.units))

    def call(self, inputs):
        nodes, adjacency = inputs
        messages = ops.matmul(adjacency, self.ffn(nodes))
        return ops.normalize(self.update(ops.concatenate([nodes, messages], axis=-1)), axis=-1)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@zoo("graph")
def graph_network():
    """Messages along a dense adjacency, a class for each graph (gnn, mpnn-molecular-graphs)."""
    nodes, adjacency = keras.Input((6, 4)), keras.Input((6, 6))
    x = GraphConvLayer(5)([nodes, adjacency])
    x = layers.add([GraphConvLayer(5)([x, adjacency]), x])
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    data = [normal(6, 4), (uniform(6, 6) < 0.4).astype("float32")]
    return compiled(keras.Model([nodes, adjacency], outputs)), data, whole(3), weights()


@zoo("reinforcement learning")
def value_regression():
    """Q-values of the actions taken: one-hot actions as a second input (deep_q_network_breakout's loss)."""
    state, action = keras.Input((6,)), keras.Input((3,))
    q = layers.Dense(3)(layers.Dense(8, activation="relu")(state))
    taken = layers.Dot(axes=1)([q, action])
    adam = keras.optimizers.Adam(learning_rate=0.00025, clipnorm=1.0)
    x = [normal(6), keras.utils.to_categorical(whole(3), 3)]
    return (
        compiled(keras.Model([state, action], taken), adam, keras.losses.Huber(), ()),
        x,
        normal(1, seed=1),
        weights(),
    )
