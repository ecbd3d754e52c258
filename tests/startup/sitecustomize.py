"""Python runs this module when it starts, in each process of the tests: they import Keras and end in half of the time.

Keras loads packages only because they are installed: scikit-learn, matplotlib and, on another backend, JAX and
TensorFlow. Here they seem absent to Keras. Other code imports them as before, and Keras takes those that are loaded
already. The garbage collector looks neither at an import of Keras nor at the end of the process, where it finds
nothing. ``WHOLE_KERAS=1`` in the environment turns all of this off, for tests that are about it.
"""

import atexit
import gc
import importlib.machinery
import os
import sys

FINDERS = (
    "importlib",
    "importlib.util",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "choros.device_choice",
)


def _absent():
    backend = os.environ.get("KERAS_BACKEND")
    others = {"jax", "tensorflow"} - {backend} if backend else set()  # without it Keras reads keras.json
    return {"sklearn", "matplotlib", *others}


class _ForKeras:
    """A finder: it hides packages from modules of Keras, and has no garbage collected while Keras is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "keras":
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _without_collections(spec.loader.exec_module)
            return spec
        if name in _absent():
            frame = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") in FINDERS:
                frame = frame.f_back
            importer = str(frame and frame.f_globals.get("__name__"))
            wanted = importer.startswith(f"keras.src.backend.{name}.")
            if importer.startswith(("keras.", "tensorflow.")) and not wanted:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def _without_collections(run):
    def run_without(module):
        collects = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            if not gc.get_freeze_count():  # to the oldest generation, which is collected least
                gc.freeze()
                gc.unfreeze()
            if collects:
                gc.enable()

    return run_without


if os.environ.get("WHOLE_KERAS") != "1":
    sys.meta_path.insert(0, _ForKeras)
    atexit.register(gc.freeze)  # the first one runs last
