"""Ranks whose weights are set on one of them alone, and numbers that are not finite, are named."""

SCRIPT = """
import contextlib, io

class Spoil(keras.callbacks.Callback):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 1:
            self.model.set_weights([weight * (1 + self.by) for weight in self.model.get_weights()])

class SpoilTwice(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 0:
            self.right = self.model.get_weights()
        if rank == 1:
            self.model.set_weights([weight * (1 + 1e-5 * (epoch % 2)) for weight in self.right])

def fit(by=0.0, lost=(), optimizer=None, epochs=3, spoil=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.01)), "mse")
    x = np.random.default_rng(rank).normal(size=(24, 4)).astype("float32")
    y = x[:, :1].copy()
    y[list(lost)] = np.nan
    out = io.StringIO()
    try:
        with contextlib.redirect_stderr(out):
            model.fit(x, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=[spoil or Spoil(by)])
    except RankMismatchError as error:
        return str(error), out.getvalue()
    return "", out.getvalue()

said["plain"] = fit()
said["far"] = fit(0.1)
said["near"] = fit(1e-5)
said["twice"] = fit(optimizer=keras.optimizers.SGD(0.0), epochs=4, spoil=SpoilTwice())
said["lost"] = fit(lost=[15] if rank == 1 else [])
said["scaled"] = fit(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**127))
"""


def test_who_differs_is_named(run):
    every = run(2, SCRIPT)
    for rank, result in enumerate(every):
        assert result["plain"][0] == result["near"][0] == result["lost"][0] == result["scaled"][0] == ""
        assert "The weights of rank 1 on " in result["far"][0]
        assert "at the end of epoch 2 from those of rank 0 on " in result["far"][0]
        assert ("in their last bits" in result["near"][1]) == (rank == 0)
        assert result["twice"][1].count("in their last bits") == (rank == 0)
        assert ("rank 1 of 2 on " in result["lost"][1]) == (rank == 1)
        assert "not finite" not in result["plain"][1] + result["scaled"][1]
    assert "a gradient is not finite, first seen in epoch 1, step 3" in every[1]["lost"][1]
