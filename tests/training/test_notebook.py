"""In a notebook: no guard, the bar in the cell's output, and an interrupted kernel that goes on."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("IPython") is None, reason="IPython is not installed: pip install ipython"
)

NOTEBOOK = '''
    import os, pathlib, sys
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()

    def children():
        return (pathlib.Path("/proc/self/task") / str(os.getpid()) / "children").read_text().split()

    def cell(source):
        return shell.run_cell(source, store_history=True)

    cell("""
    import keras, numpy as np, choros, time
    class Slow(keras.utils.PyDataset):
        def __init__(self, seconds, batches):
            super().__init__()
            self.seconds, self.batches = seconds, batches
        def __len__(self):
            return self.batches
        def __getitem__(self, index):
            time.sleep(self.seconds)
            return np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    class Mine(keras.layers.Layer):
        def call(self, x):
            return 2 * x
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Mine()])
    model.compile("sgd", "mse")
    trainer = choros.Trainer(model, "aeasgd", workers=2)
    """).raise_error()
    cell("history = trainer.fit(Slow(0.0, 8), epochs=2)").raise_error()
    class Tell:
        pass
    cell("""
    class Begun(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            print("BEGUN", flush=True)
    trainer.fit(Slow(0.05, 100000), callbacks=[Begun()], verbose=0)
    """)
    assert isinstance(cell("1").result, int)
    print("INTERRUPTED", len(children()), flush=True)
    result = cell("trainer.fit(Slow(0.0, 8), verbose=0).history['loss'][0]")
    result.raise_error()
    print("AFTER", result.result >= 0, len(children()), flush=True)
'''


def test_interrupting_a_cell_keeps_the_kernel(tmp_path):
    (tmp_path / "kernel.py").write_text(textwrap.dedent(NOTEBOOK))
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "kernel.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as kernel:
        lines = []
        try:
            for line in kernel.stdout:
                lines.append(line)
                if line.startswith("BEGUN"):
                    os.kill(kernel.pid, signal.SIGINT)
        finally:
            kernel.kill()
    text = "".join(lines)
    assert "Epoch 2/2" in text, text
    assert "━" in text, text
    assert "KeyboardInterrupt" in text, text
    assert "INTERRUPTED 0" in text, text
    assert "AFTER True 0" in text, text
