"""Tasks of KerasHub: refused with a remedy, and after it trained as their own ``fit`` trains them.

The tasks are made from a configuration and a vocabulary in memory: nothing is downloaded.
"""

import importlib.util

import numpy as np
import pytest

import choros
from choros.errors import InvalidInputError

if importlib.util.find_spec("keras_hub") is None:
    pytest.skip("keras_hub is not installed", allow_module_level=True)
keras = pytest.importorskip("keras")
keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)

RANDOM = np.random.default_rng(0)
WORDS = ["the", "quick", "brown", "fox", "jumped", "."]
TEXTS = [" ".join(RANDOM.choice(WORDS, RANDOM.integers(2, 9))) for _ in range(40)]
IMAGES = RANDOM.integers(0, 256, (40, 20, 20, 3)).astype("uint8")
LABELS = RANDOM.integers(0, 3, 40)
FIT = {"batch_size": 8, "epochs": 2, "verbose": 0}


def images(preprocessed=True):
    """A classifier of images without batch normalisation, which workers do by their own rows."""
    keras.utils.set_random_seed(1)
    sizes = {"patch_size": (8, 8), "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    backbone = keras_hub.models.ViTBackbone(image_shape=(16, 16, 3), **sizes)
    converter = keras_hub.layers.ImageConverter(image_size=(16, 16), scale=1 / 255, offset=-0.5)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter) if preprocessed else None
    return compiled(keras_hub.models.ViTImageClassifier(backbone, 3, preprocessor))


def texts(preprocessed=True, lora=0):
    """A classifier of texts without dropout."""
    keras.utils.set_random_seed(1)
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "quick", "brown", "fox", "jump", "##ed", "."]
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 10}
    backbone = keras_hub.models.BertBackbone(len(vocabulary), dropout=0.0, **sizes)
    tokenizer = keras_hub.models.BertTokenizer(vocabulary)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=10)
    task = keras_hub.models.BertTextClassifier(backbone, 3, preprocessor if preprocessed else None, dropout=0.0)
    if lora:
        backbone.enable_lora(lora)
    return compiled(task)


def texts_with_lora():
    return texts(lora=2)


def compiled(task):
    """Compile otherwise than the task itself does as it is made."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss, metrics=["accuracy"])
    return task


def remedy(task, x, y):
    """Do what the refusal says."""
    x, y = task.preprocess_samples(x, y)
    task.preprocessor = None
    return x, y


def values(task):
    return [np.array(keras.ops.convert_to_numpy(weight)) for weight in task.weights]


TASKS = pytest.mark.parametrize(("make", "raw"), [(images, IMAGES), (texts, TEXTS), (texts_with_lora, TEXTS)])
pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")


@TASKS
def test_a_task_with_a_preprocessor_is_refused_with_the_remedy(make, raw):
    with pytest.raises(InvalidInputError, match=r"model\.preprocess_samples\(x, y\)") as refused:
        choros.Trainer(make(), "allreduce", workers=2)
    assert "model.preprocessor = None" in str(refused.value)


@TASKS
def test_after_the_remedy_fit_and_evaluate_are_those_of_the_task(make, raw, pools, same):
    plain, task = make(), make()
    reference = plain.fit(raw, LABELS, **FIT).history
    start, preprocessor = values(task), task.preprocessor
    x, y = remedy(task, raw, LABELS)
    trainer = choros.Trainer(task, "allreduce", workers=2, pool=pools(2))
    ours = trainer.fit(x, y, shuffle=False, **FIT).history  # a task's own fit takes arrays as they come
    assert max(np.abs(a - b).max() for a, b in zip(start, values(task), strict=True)) > 1e-3
    same(plain, task)
    assert set(ours) == set(reference)
    for name in reference:
        np.testing.assert_allclose(ours[name], reference[name], atol=1e-5, err_msg=name)
    expected = plain.evaluate(raw, LABELS, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(x, y, batch_size=8, verbose=0), expected, atol=1e-5)
    np.testing.assert_allclose(task.evaluate(x, y, batch_size=8, verbose=0), expected, atol=1e-5)
    task.preprocessor = preprocessor  # as the trained task is used from now on
    np.testing.assert_allclose(task.evaluate(raw, LABELS, batch_size=8, verbose=0), expected, atol=1e-5)


@TASKS
def test_asynchronous_workers_train_what_was_compiled(make, raw, pools):
    task = make()
    x, y = remedy(task, raw, LABELS)
    start = values(task)
    trainer = choros.Trainer(task, "aeasgd", workers=2, pool=pools(2))
    history = trainer.fit(x, y, **FIT).history
    assert set(history) == {"loss", "accuracy"}
    assert np.isfinite(history["loss"]).all()
    assert max(np.abs(a - b).max() for a, b in zip(start, values(task), strict=True)) > 1e-3
    repeated = task.evaluate(x, y, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(x, y, batch_size=8, verbose=0), repeated, atol=1e-6)


def test_a_task_made_without_preprocessor_is_trained(pools, same):
    x = (IMAGES[:, :16, :16] / 255).astype("float32")
    plain, task = images(preprocessed=False), images(preprocessed=False)
    plain.fit(x, LABELS, **FIT)
    choros.Trainer(task, "allreduce", workers=2, pool=pools(2)).fit(x, LABELS, shuffle=False, **FIT)
    same(plain, task)


def test_members_of_an_ensemble_have_the_optimizer_that_was_compiled(pools):
    task = texts()
    x, y = remedy(task, TEXTS, LABELS)
    trainer = choros.Trainer(task, "ensemble", workers=2, pool=pools(2))
    trainer.fit(x, y, **FIT)
    assert [float(member.optimizer.momentum) for member in trainer.models] == [0.5, 0.5]
    assert trainer.predict(x, verbose=0).shape == (40, 3)


def test_validation_and_weights_of_rows_are_preprocessed_alike(pools, same):
    weights = np.linspace(0.5, 2, 40).astype("float32")
    plain, task = images(), images()
    held = IMAGES[:12], LABELS[:12]
    expected = plain.fit(IMAGES, LABELS, sample_weight=weights, validation_data=held, **FIT).history
    x, y, rows = task.preprocess_samples(IMAGES, LABELS, weights)
    held = remedy(task, *held)
    trainer = choros.Trainer(task, "allreduce", workers=2, pool=pools(2))
    ours = trainer.fit(x, y, sample_weight=rows, validation_data=held, shuffle=False, **FIT).history
    same(plain, task)
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], atol=1e-5, err_msg=name)


def test_a_task_of_a_users_own_with_another_fit_is_refused():
    class Mine(keras_hub.models.ViTImageClassifier):
        def fit(self, x, *args, **kwargs):
            return super().fit(x * 0, *args, **kwargs)

    class Own(keras_hub.models.ViTImageClassifier):
        def preprocess_samples(self, x, y=None, sample_weight=None):
            return keras.utils.pack_x_y_sample_weight(x * 0, y, sample_weight)

    backbone = images().backbone
    for kind in (Mine, Own):
        with pytest.raises(InvalidInputError, match=kind.__name__):
            choros.Trainer(compiled(kind(backbone=backbone, num_classes=3)), workers=2)


def test_a_preprocessor_put_back_before_fit_is_refused():
    task = images()
    preprocessor, task.preprocessor = task.preprocessor, None
    trainer = choros.Trainer(task, workers=2)
    task.preprocessor = preprocessor
    with pytest.raises(InvalidInputError, match="preprocess_samples"):
        trainer.fit(IMAGES[:, :16, :16], LABELS, **FIT)
