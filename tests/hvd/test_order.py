"""``train_step`` that goes on with updated weights, with ``hvd.DistributedOptimizer``: made again with the sum."""

import numpy as np

SCRIPT = """
class Teacher(keras.Model):
    def __init__(self):
        super().__init__()
        self.student = keras.layers.Dense(1)
        self.teacher = keras.layers.Dense(1, trainable=False)

    def call(self, x, training=False):
        return self.student(x) + 0.1 * self.teacher(x)

    def train_step(self, *data):
        if keras.backend.backend() != "jax":
            logs = keras.Model.train_step(self, *data)
            self.follow()
            return logs
        logs, (trained, others, slots, metrics) = keras.Model.train_step(self, *data)
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        with keras.StatelessScope(state_mapping=list(zip(variables, [*trained, *others]))) as scope:
            self.follow()
        trained = [scope.get_current_value(variable) for variable in self.trainable_variables]
        others = [scope.get_current_value(variable) for variable in self.non_trainable_variables]
        return logs, (trained, others, slots, metrics)

    def follow(self):
        for mine, taught in zip(self.teacher.variables, self.student.variables):
            mine.assign(0.9 * mine + 0.1 * taught)

def made(optimizer):
    keras.utils.set_random_seed(1)
    model = Teacher()
    model(x[:1])
    model.compile(optimizer, "mse")
    return model

random = np.random.default_rng(0)
x, y = random.normal(size=(16, 3)).astype("float32"), random.normal(size=(16, 1)).astype("float32")
plain = made(keras.optimizers.Adam(0.05))
plain.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
said["plain"] = [numbers(v) for v in plain.variables]

mine = np.concatenate([np.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4) for step in range(2)])
model = made(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
model.fit(x[mine], y[mine], batch_size=4, shuffle=False, epochs=2, verbose=0)
said["reduced"] = [numbers(v) for v in model.variables]

several = made(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), backward_passes_per_step=2))
try:
    several.fit(x[mine], y[mine], batch_size=4, verbose=0)
except Exception as error:
    said["several"] = f"{type(error).__name__}: {error}"
"""


def test_it_is_exact_or_refused_by_name(run):
    for said in run(2, SCRIPT):
        for mine, plain in zip(said["reduced"], said["plain"], strict=True):
            np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
        assert said["several"].startswith("BadInput: Teacher.train_step goes on with updated weights")
        assert "backward_passes_per_step=2" in said["several"]
