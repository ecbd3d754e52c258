"""Train scikit-learn's digits with two asynchronous workers, and save a plain Keras file.

Run it with ``python examples/digits.py`` (needs ``pip install 'choros[jax,demo]'``).
"""

import sys
import tempfile
from pathlib import Path

import keras

import choros
from choros.tools.demo.datasets.digits import load_digits

data = load_digits()
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((data.x_train.shape[1],)),
        keras.layers.Dense(200, "relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(data.classes, "softmax"),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])

trainer = choros.Trainer(model, choros.AEASGD(window=8), workers=2)
history = trainer.fit(
    data.x_train,
    data.y_train,
    epochs=10,
    batch_size=32,
    seed=0,
    verbose=2,
    validation_data=(data.x_test, data.y_test),
    callbacks=[keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)],
)
loss, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
print(f"accuracy {accuracy:.3f} after {len(history.history['loss'])} epochs, {history.run.exchanges} exchanges")

path = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "digits.keras"
model.save(path)
print(f"saved {path}, which loads in plain Keras")
