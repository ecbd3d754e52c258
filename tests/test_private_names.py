"""The contract with Keras, JAX, PyTorch, TensorFlow and pyspark: every name of theirs that is not public.

``PRIVATE`` and ``UNDOCUMENTED`` are the only lists of such names. The source is parsed for uses of private names; a use
that is not listed fails, and so does a name that is listed but not used. Each name is looked up in the installed
version. Behavior that Choros relies on is tested where a lookup says too little.
"""

import argparse
import ast
import importlib
import inspect
import pathlib
import re
import sys
from collections import defaultdict
from typing import NamedTuple

import keras
import numpy as np
import pytest

import choros

ROOT = pathlib.Path(choros.__file__).parent


class Name(NamedTuple):
    """A name, the object that has it (a dotted path, or a key of EXAMPLES), and the reason for its use."""

    name: str
    home: str
    purpose: str


# Names that later versions of Keras do not have, and the first of these. Choros uses them only where they are there.
UNTIL = {"_exclude_from_weight_decay_cache": (3, 16)}
DECAY = "the source of keras.src.optimizers.base_optimizer.BaseOptimizer"
# What the scan of the source finds: names with an underscore, and modules that are not public.
PRIVATE = [
    # Keras: models and layers
    Name("_symbolic_build", "keras.Model", "builds model, metrics and optimizer from a batch (backend, hvd)"),
    Name("_flatten_layers", "keras.Model", "all layers, also nested ones"),
    Name("_trainable_variables", "keras.Layer()", "a layer's weights, whether frozen or not (backends/base.py)"),
    Name("_trainable_variables", "keras.optimizers.SGD()", "the variables of a built optimizer (hvd/custom_loop.py)"),
    Name("_compile_loss", "keras.Model()", "the losses with their weights (backends/loss_exactness.py)"),
    Name("_compile_metrics", "keras.Model()", "whether the metrics are built; replaced for a batch without y"),
    Name(
        "_flat_losses",
        "CompileLoss",
        "the losses one by one; one of them is replaced in place (backends/loss_exactness.py)",
    ),
    Name("_loss_tracker", "keras.Model()", "the metric that Keras made for the loss (backends/metric_additivity.py)"),
    Name("_get_metrics_result_or_logs", "keras.Model", "called at the end of an epoch's batches (hvd/fit_patch.py)"),
    Name(
        "_eval_epoch_iterator",
        "the source of keras.src.backend.torch.trainer.TorchTrainer.evaluate",
        "set by fit, which no step reads (backends/model_watch.py)",
    ),
    Name("_initial_epoch", "keras.Model()", "where BackupAndRestore lets fit begin (hvd/callback_guards.py)"),
    Name("_inputs_struct", "keras.Model()", "names of a functional model's inputs (spark/prediction_columns.py)"),
    Name("_outputs_struct", "keras.Model()", "names of a functional model's outputs (spark/prediction_columns.py)"),
    Name(
        "_inbound_nodes",
        "keras.Layer()",
        "the calls of an operation of a functional model (consistency/model_fingerprint.py)",
    ),
    Name("_keras_history", "a symbolic tensor", "the operation that made a tensor (consistency/model_fingerprint.py)"),
    Name("_moments", "keras.layers.BatchNormalization", "mean and variance of a batch (hvd/sync_batch_norm.py)"),
    Name("_dropout", "keras.layers.MultiHeadAttention()", "a rate of dropout (tools/check/model_state.py)"),
    # Keras: compile, optimizers, metrics, callbacks, distribution
    Name("_use_weight_decay", "keras.optimizers.SGD", "exceptions from weight decay (backends/optimizer_shard)"),
    Name("_apply_weight_decay", "keras.optimizers.SGD", "not called without variables (backends/optimizer_shard)"),
    Name("_accumulated_gradients", "keras.optimizers.SGD()", "slots (optimizer_shard)"),
    Name("_backend_apply_gradients", "keras.optimizers.SGD", "a class with its own is not divided (optimizer_shard)"),
    Name("_backend_update_step", "keras.optimizers.SGD", "a class with its own is not divided (optimizer_shard)"),
    Name("_clip_gradients", "keras.optimizers.SGD", "a class with its own is not divided (backends/optimizer_shard)"),
    Name("_path", "keras.Variable", "a part of a variable gets its path (backends/optimizer_shard)"),
    Name("_iterations", "keras.optimizers.SGD()", "the step counter; optimizer.iterations may be another's"),
    Name("_learning_rate", "keras.optimizers.SGD()", "a variable, or a schedule (hvd/lr_callbacks.py)"),
    Name("_momentums", "keras.optimizers.Adam()", "slots that a change of the rate corrects (hvd/lr_callbacks.py)"),
    Name("_fn", "keras.metrics.MeanSquaredError()", "the function inside a metric (backends/metric_additivity.py)"),
    Name("_fn_kwargs", "keras.metrics.MeanSquaredError()", "arguments of its function (backends/loss_exactness.py)"),
    Name("_model_variables_moving_average", "keras.optimizers.SGD()", "slots of EMA (backends/__init__.py)"),
    Name("_user_metrics", "CompileMetrics", "what compile was given (consistency/rank_agreement.py)"),
    Name("_user_weighted_metrics", "CompileMetrics", "what compile was given (consistency/rank_agreement.py)"),
    Name("_model", "keras.callbacks.Callback()", "the model without what PyTorch wraps (callbacks/time_limit.py)"),
    Name("_weights_path", "keras.callbacks.BackupAndRestore()", "whether a backup is there (hvd/callback_guards.py)"),
    Name("_save_model", "keras.callbacks.ModelCheckpoint", "saves on rank 0 only (hvd/callbacks.py)"),
    Name(
        "_layout_map",
        "keras.distribution.ModelParallel()",
        "the layout of a distribution (backends/devices/weight_layout.py)",
    ),
    # Keras: what its objects keep, and what is not pickled with them
    Name("_value", "keras.Variable", "a variable's value, which travels beside the pickle (pickling.py)"),
    Name("_dtype", "keras.Variable", "a variable's own type, whatever the autocast (pickling.py)"),
    Name("_layout", "keras.Variable", "a variable's layout, made anew in each process (pickling.py)"),
    Name("_convert_to_tensor", "keras.Variable", "a tensor of an array (pickling.py)"),
    Name("_initialize", "keras.Variable", "sets the first value, laid out as the distribution says (pickling.py)"),
    Name("_losses", "keras.Layer()", "tensors of the last call (pickling.py)"),
    Name("_loss_ids", "keras.Layer()", "addresses of these (pickling.py)"),
    Name("_trainable_variables_indices", "keras.optimizers.SGD()", "places by addresses of variables (pickling.py)"),
    Name("_var_key", "keras.optimizers.SGD()", "the address of a variable, or TensorFlow's number (pickling.py)"),
    Name("_exclude_from_weight_decay", DECAY, "addresses of variables (pickling.py)"),
    Name("_exclude_from_weight_decay_cache", DECAY, "what was found for them (pickling.py)"),
    Name("_eval_epoch_iterator", "the source of keras.src.backend.tensorflow.trainer", "data (pickling.py)"),
    Name("_jax_state", "the source of keras.src.backend.jax.trainer", "left by evaluate and predict (pickling.py)"),
    Name("_compiled_call_impl", "torch.nn.Module", "a compiled call, which cannot be pickled (pickling.py)"),
    Name("_inputs", "a functional model", "the tensors that its graph begins with (pickling.py)"),
    Name("_outputs", "a functional model", "the tensors that its graph ends with (pickling.py)"),
    Name("_nodes", "a functional model", "addresses of its operations (pickling.py)"),
    Name("_backend", "the source of keras.src.utils.backend_utils.DynamicBackend", "its only state (pickling.py)"),
    # Keras: modules
    Name("keras.src", "", "whether Keras is loaded (pickling.py)"),
    Name("keras.src.ops.function:Function", "", "what has _nodes (pickling.py)"),
    Name("keras.src.models.functional:Functional", "", "the class of models of inputs and outputs (pickling.py)"),
    Name("keras.src.models.model:inject_functional_model_class", "", "makes a class one of these (pickling.py)"),
    Name("keras.src.ops.function:map_graph", "", "makes _nodes (pickling.py)"),
    Name("keras.src.ops.node:Node", "", "pickled as an empty shell first (pickling.py)"),
    Name("keras.src.saving.keras_saveable:KerasSaveable", "", "the base of all that Keras pickles (pickling.py)"),
    Name("keras.src.utils.backend_utils:DynamicBackend", "", "its __getattr__ needs its state (pickling.py)"),
    Name("keras.src.utils.tracking:Tracker", "", "keeps addresses of variables (pickling.py)"),
    Name("keras.src.utils:tracking", "", "containers that need their tracker (pickling.py)"),
    Name(
        "keras.src.backend.common.masking:get_keras_mask", "", "the mask of a prediction (backends/loss_weighting.py)"
    ),
    Name("keras.src.utils.module_utils", "", "Keras' lazy import of TensorFlow (backends/hide_tensorflow.py)"),
    Name(
        "_available",
        "keras.src.utils.module_utils.tensorflow",
        "None until it was looked for (backends/hide_tensorflow.py)",
    ),
    Name("keras.src.trainers.data_adapters:array_data_adapter", "", "its get_tf_dataset is replaced (hvd/graph)"),
    Name("keras.src.trainers.data_adapters:py_dataset_adapter", "", "its get_tf_dataset is replaced (hvd/graph)"),
    Name("keras.src:backend", "", "the functions of random numbers and statistics (backends/loss_trial.py)"),
    # PyTorch
    Name("_foreach_lerp_", "torch", "one kernel for all variables (backends/torch.py)"),
    Name("_foreach_sub", "torch", "one kernel for all variables (backends/torch.py)"),
    Name("_foreach_add_", "torch", "one kernel for all variables (backends/torch.py)"),
    Name("_foreach_copy_", "torch", "one kernel for all variables (backends/torch.py)"),
    Name("_forward_hooks", "torch.nn.Module()", "a model with hooks is not recorded (backends/model_watch.py)"),
    Name("_forward_pre_hooks", "torch.nn.Module()", "a model with hooks is not recorded (backends/model_watch.py)"),
    Name("_backward_hooks", "torch.nn.Module()", "a model with hooks is not recorded (backends/model_watch.py)"),
    Name("_backward_pre_hooks", "torch.nn.Module()", "a model with hooks is not recorded (backends/model_watch.py)"),
    Name("_post_accumulate_grad_hooks", "torch.Tensor", "hooks of a tensor (backends/model_watch.py)"),
    Name("_has_any_global_hook", "torch.nn.modules.module", "hooks of all modules (backends/recorded_step/torch.py)"),
    Name("torch._inductor:standalone_compile", "", "compiles a record (backends/recorded_step/torch.py)"),
    Name("_clear_losses", "keras.Layer", "no tensors of a recorded step stay (backends/recorded_step/torch.py)"),
    Name("_version", "torch.Tensor", "how often a tensor was set (backends/driver_model.py)"),
    Name("_Options", "torch.distributed.ProcessGroupGloo", "options of gloo (comm/offload/torch.py)"),
    Name("_timeout", "gloo's options", "seconds that a sum may last (comm/offload/torch.py)"),
    Name("_threads", "gloo's options", "threads of gloo (comm/offload/torch.py)"),
    Name("_devices", "gloo's options", "the network that gloo uses (comm/offload/torch.py)"),
    # TensorFlow
    Name("_DictWrapper", "tensorflow.python.trackable.data_structures", "a view of a dict (pickling.py)"),
    Name("_TupleWrapper", "tensorflow.python.trackable.data_structures", "a view of a tuple (pickling.py)"),
    Name(
        "_default_value",
        "tensorflow.lookup.experimental.MutableHashTable()",
        "what it gives for other keys (pickling.py)",
    ),
    Name("_clone", "tensorflow.function()", "a function not traced yet (pickling.py)"),
    Name("_function_captures", "the source of tensorflow.python.framework.func_graph", "a trace's variables (backend)"),
    Name("tensorflow.python.distribute", "", "where strategies are (pickling.py)"),
    Name("tensorflow.python.framework:op_def_registry", "", "which operations have a state (backend)"),
    Name("tensorflow.python.eager:record", "", "could_possibly_record: whether a tape looks on (hvd/graph)"),
    # pyspark
    Name("_dummy", "pyspark.ml.param.Params", "the parent of a Param of a class (spark/params.py)"),
    Name("_setDefault", "pyspark.ml.param.Params", "defaults of Params (spark/params.py)"),
    Name("_set", "pyspark.ml.param.Params", "values of Params (spark/ml_persistence.py)"),
    Name("_resetUid", "pyspark.ml.param.Params", "the uid of a stage that is loaded (spark/ml_persistence.py)"),
    Name(
        "_paramMap", "the source of pyspark.ml.param.Params", "values of Params that were set (spark/ml_persistence.py)"
    ),
    Name("_defaultParamMap", "the source of pyspark.ml.param.Params", "defaults of Params (spark/ml_persistence.py)"),
    Name("_jsc", "the source of pyspark.SparkContext", "maxNumConcurrentTasks; guarded (spark/task_slots.py)"),
    Name("_jdf", "the source of pyspark.sql.classic.dataframe.DataFrame", "queryExecution; guarded (spark/barrier.py)"),
    # Python: documented, though they begin with an underscore, but for _run_exitfuncs and _initializing
    Name("_getframe", "sys", "the caller's frame (errors.py, hvd/rank_shard.py)"),
    Name("_exit", "os", "ends a process at once"),
    Name("_get_option_tuples", "argparse.ArgumentParser", "the options that an argument may abbreviate (cli)"),
    Name("_check_value", "argparse.ArgumentParser", "the check of a value against its choices (cli/parser.py)"),
    Name("_actions", "argparse.ArgumentParser()", "a parser's options (cli/parser.py)"),
    Name("_replace", "collections.namedtuple()", "a tuple with another value"),
    Name("_lru_cache_wrapper", "functools", "the type of a function with a cache (pickling.py)"),
    Name("_initializing", "json.__spec__", "whether a module is still being imported (device_choice.py)"),
    Name("_run_exitfuncs", "atexit", "what an interpreter does when it ends (launch/process/pool_worker.py)"),
]

# What no scan can tell from a public name. The word must occur in the source.
UNDOCUMENTED = [
    Name("_fill_text", "argparse.HelpFormatter", "wraps the text of a help page (cli/parser.py)"),
    Name("seed_generator_state", "", "the name of a seed's variable (backends/seed_state.py)"),
    Name("epoch_iterator.py", "", "the file whose reset() ends an epoch that was only looked at (hvd/rank_shard.py)"),
    Name("get_tf_dataset", "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter", "hvd/graph"),
    Name("get_tf_dataset", "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter", "hvd/graph"),
    Name("could_possibly_record", "tensorflow.python.eager.record", "hvd/host_ops/tensorflow.py"),
    Name("jax_state_sync", "keras.Model()", "brings JAX' state into the model; on JAX only (hvd/lr_callbacks.py)"),
    Name(
        "LossFunctionWrapper",
        "keras.src.losses.losses",
        "the class of a compiled function (backends/loss_exactness.py)",
    ),
    Name("arguments", "a node", "the arguments of a call (consistency/model_fingerprint.py)"),
    Name("tensor_index", "a tensor's history", "which output it is (consistency/model_fingerprint.py)"),
    Name("Tracer", "jax.core", "a value inside jax.jit (hvd/tensor_conversion.py)"),
    Name("io_callback", "jax.experimental", "calls back to the host (hvd/host_ops/jax.py)"),
    Name("committed", "a jax array", "whether the user put an array on a device (hvd/tensor_conversion.py)"),
    Name("client", "a jax device", "kept alive under a call that has not ended (comm/offload/jax.py)"),
    Name("jax_num_cpu_devices", "jax's flags", "how many devices a CPU is (backends/devices/jax.py)"),
    Name("jax_cpu_collectives_implementation", "jax's flags", "gloo (comm/offload/jax.py)"),
    Name("jax_enable_preemption_service", "jax's flags", "off, as it ignores SIGTERM (comm/offload/jax.py)"),
    Name("jax_enable_recoverability", "jax's flags", "a rank may die alone (comm/offload/jax.py)"),
    Name("create_device", "torch.distributed.ProcessGroupGloo", "the network of gloo (comm/offload/torch.py)"),
    Name("ReadVariableOp", "tensorflow.raw_ops", "a variable's value without a copy (backends/tensorflow.py)"),
    Name("get_default_graph", "tensorflow.compat.v1", "the graph that is traced (backends/tensorflow.py)"),
]

# Objects of Choros' own classes by the expression that reaches into them; the name must be defined in Choros.
FRIENDS = {
    "center": "SharedMemoryParameterServer",
    "param_server/sharded_center_state.py: server": "ShardedParameterServer",
    "param_server/sharded_center_state.py: shard": "SharedMemoryParameterServer",
    "replica": "BaseReplica",
    "spill": "Spill",
    "self.replica": "BaseReplica",
    "training/lazy_weights.py: lazy": "LazyWeights",
    "data/sample_rows.py: source": "Source",
    "self.lead": "BaseReplica",
    "self._collectives": "Collectives",
    "data/files/source.py: part_source": "StoredSource",
    "comm/offload/torch.py: backend": "TorchBackend",
}
# Strings that look like private names and are none of a library's.
WORDS = {
    "_": "a separator",
    "_T": "the end of a type's name",
    "_us": "the end of a name in the timeline (comm/trace_format.py)",
    "_list": "the end of a name of TFRecord's (data/files/tfrecord.py)",
    "_normalized": "the end of a column's name (spark/distkeras)",
    "_self_": "the begin of names of TensorFlow's tracking (backends/optimizers.py)",
    "_self_last_wrapped_dict_snapshot": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_name_based_restores": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_saveable_object_factories": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_tracked_trackables": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_unconditional_checkpoint_dependencies": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_unconditional_deferred_dependencies": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_unconditional_dependency_names": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_self_update_uid": "of TensorFlow's tracking, left out of pickles (pickling.py)",
    "_trainer": "an attribute of Choros' own (parallel/multi_gpu_model.py)",
    "_host_group": "an attribute of Choros' own (comm/hierarchical_group.py)",
}
OURS = "_choros_"  # begins what Choros adds to objects of Keras
MODULE = re.compile(r"(keras\.src|tensorflow\.python|(jax|jaxlib|torch|keras|tensorflow|pyspark)\.(\w+\.)*_)[\w.]*")
IDENTIFIER = re.compile(r"_[a-zA-Z_]?\w*")


class Class(NamedTuple):
    """A class of the source: the names of its bases, and what it defines itself."""

    bases: set
    names: set


def classes(trees):
    """Return every class by its name; classes of one name are taken together."""
    known = defaultdict(lambda: Class(set(), set()))
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                known[node.name].bases.update(ast.unparse(base).split("[")[0] for base in node.bases)
                known[node.name].names.update(defined(node))
    return known


def defined(node):
    """Yield the names that a class defines: functions, assignments, and what its methods set on ``self``."""
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield part.name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            yield part.attr


def inherited(name, known, seen=()):
    """Return what a class and its bases of Choros define."""
    if name not in known or name in seen:
        return set()
    values = known[name]
    return values.names.union(*(inherited(base.split(".")[-1], known, (*seen, name)) for base in values.bases))


def uses(path, tree, known):
    """Yield (name, line) of each private name that a file uses of a library's."""
    everything = set().union(*(result.names for result in known.values()))
    here = set(defined(tree))
    within = {}
    for owner in ast.walk(tree):  # outer classes first, so that the inner one stays
        if isinstance(owner, ast.ClassDef):
            within |= {id(part): owner.name for part in ast.walk(owner)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and IDENTIFIER.fullmatch(node.attr) and not node.attr.startswith("__"):
            base, owner = ast.unparse(node.value), within.get(id(node))
            if base in ("self", "cls"):
                ours = owner is None or node.attr in inherited(owner, known)
            elif base == "super()":
                bases = known[owner].bases
                ours = any(node.attr in inherited(result.split(".")[-1], known) for result in bases)
            elif base in known:
                ours = node.attr in inherited(base, known)
            else:
                ours = (base in FRIENDS or f"{path}: {base}" in FRIENDS) and node.attr in everything
            if not ours and not node.attr.startswith(OURS):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("keras.src", "tensorflow.python", "jax._src"):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            ours = word in here or word in WORDS or word.startswith(("__", OURS))
            if MODULE.fullmatch(word) or (IDENTIFIER.fullmatch(word) and not ours):
                yield word, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            complete = getattr(node, "module", None)
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else f"{complete or ''}.{alias.name}"
                ours = node.col_offset >= 0 and (complete or alias.name).startswith(("choros", "__future__"))
                if not ours and (MODULE.fullmatch(module) or any(part.startswith("_") for part in module.split("."))):
                    yield module if isinstance(node, ast.Import) else f"{complete}:{alias.name}", node.lineno


def scanned(sources):
    """Return the private names in sources, a dict from paths to text, and where each is used."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    known = classes(trees.values())
    results = defaultdict(list)
    for path, tree in trees.items():
        for name, line in uses(path, tree, known):
            results[name].append(f"{path}:{line}")
    return results


@pytest.fixture(scope="module")
def sources():
    """The text of every file of the package, by its path in it."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def test_every_private_name_that_the_source_uses_is_listed(sources):
    result = scanned(sources)
    listed = {entry.name for entry in PRIVATE}
    missing = [f"{name} in {', '.join(places)}" for name, places in sorted(result.items()) if name not in listed]
    assert not missing, "Use a public name, or list these in PRIVATE: " + "; ".join(missing)
    assert listed <= result.keys(), f"no longer used: {sorted(listed - result.keys())}"


def test_every_undocumented_name_is_still_used(sources):
    everything = "\n".join(sources.values())
    for entry in UNDOCUMENTED:
        assert re.search(rf"\b{re.escape(entry.name)}\b", everything), entry


def test_every_entry_says_what_it_is_for():
    for entry in [*PRIVATE, *UNDOCUMENTED]:
        assert len(entry.purpose) > 5, entry
    assert len({(entry.name, entry.home) for entry in PRIVATE}) == len(PRIVATE)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model._hidden", "_hidden"),
        ("def f(model): return model.layers[0]._hidden", "_hidden"),
        ("getattr(model, '_hidden', None)", "_hidden"),
        ("hasattr(model, '_hidden')", "_hidden"),
        ("vars(model)['_hidden'] = 1", "_hidden"),
        ("vars(model).pop('_hidden')", "_hidden"),
        ("for name in ('_hidden',): setattr(model, name, 1)", "_hidden"),
        ("class A(keras.Model):\n    def f(self): return self._hidden", "_hidden"),
        ("class A(keras.Model):\n    def _hidden(self): return super()._hidden()", "_hidden"),
        ("class A:\n    def __init__(self, m): self._m = m; m._hidden = self._m", "_hidden"),
        ("import keras.src.losses", "keras.src.losses"),
        ("from keras.src.losses import losses", "keras.src.losses:losses"),
        ("from keras import src", "keras:src"),
        ("from jax._src import core", "jax._src:core"),
        ("import jax\njax._src.core", "_src"),
        ("import keras\nkeras.src.losses", "keras.src"),
        ("from torch import _dynamo", "torch:_dynamo"),
        ("from tensorflow.python.eager import record", "tensorflow.python.eager:record"),
        ("importlib.import_module('keras.src.losses')", "keras.src.losses"),
        ("sys.modules['jax._src.core']", "jax._src.core"),
        ("sys._getframe(1)", "_getframe"),
    ],
)
def test_the_scan_finds(text, name):
    assert list(scanned({"new.py": text})) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self): self._x = 1\n    def f(self): return self._x",
        "class A:\n    _x = 1\nclass B(A):\n    def f(self): return self._x + super()._x + A._x",
        "class SharedMemoryParameterServer:\n    _x = 1\ndef f(center): return center._x",
        "from choros.types import _x",
        "model.__dict__['__weights__']",
        "vars(model)['_choros_plain']",
        "'Keras has keras.src.losses for that'",
        "_x = 1\nglobals()['_x']",
    ],
)
def test_the_scan_leaves_out_what_is_not_a_librarys(text):
    assert not scanned({"new.py": text})


def functional():
    """A compiled and built functional model whose inputs and outputs have names."""
    inputs = {name: keras.Input((3,), name=name) for name in "ab"}
    outputs = {"c": keras.layers.Dense(1, name="c")(keras.layers.Add()([inputs["a"], inputs["b"]]))}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"c": "mse"}, metrics={"c": ["mae"]}, weighted_metrics={"c": ["mse"]})
    x, y = {"a": np.ones((4, 3)), "b": np.ones((4, 3))}, {"c": np.ones((4, 1))}
    model.fit(x, y, verbose=0)
    return model


def optimizer(kind):
    """An optimizer that is built."""
    made = kind(0.1, use_ema=True, gradient_accumulation_steps=2)
    made.build([keras.Variable(np.ones(2, "float32"))])
    return made


def model_parallel():
    """A distribution over one device."""
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    return keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch", auto_shard_dataset=False
    )


def table():
    """A table of TensorFlow."""
    tensorflow = importlib.import_module("tensorflow")
    return tensorflow.lookup.experimental.MutableHashTable(tensorflow.string, tensorflow.int64, default_value=0)


EXAMPLES = {
    "argparse.ArgumentParser()": argparse.ArgumentParser,
    "keras.Model()": functional,
    "torch.nn.Module()": lambda: importlib.import_module("torch").nn.Module(),
    "keras.Variable": lambda: keras.Variable(1.0),
    "a functional model": functional,
    "keras.Layer()": lambda: keras.layers.Dense(1),
    "CompileLoss": lambda: functional()._compile_loss,
    "CompileMetrics": lambda: functional()._compile_metrics,
    "a symbolic tensor": lambda: keras.Input((3,)),
    "a node": lambda: keras.layers.Dense(1)(keras.Input((3,)))._keras_history.operation._inbound_nodes[0],
    "a tensor's history": lambda: keras.Input((3,))._keras_history,
    "keras.optimizers.SGD()": lambda: optimizer(keras.optimizers.SGD),
    "keras.optimizers.Adam()": lambda: optimizer(keras.optimizers.Adam),
    "tensorflow.function()": lambda: importlib.import_module("tensorflow").function(abs),
    "tensorflow.lookup.experimental.MutableHashTable()": table,
    "keras.layers.MultiHeadAttention()": lambda: keras.layers.MultiHeadAttention(1, 1),
    "keras.metrics.MeanSquaredError()": keras.metrics.MeanSquaredError,
    "keras.callbacks.Callback()": keras.callbacks.Callback,
    "keras.callbacks.BackupAndRestore()": lambda: keras.callbacks.BackupAndRestore("backup"),
    "keras.distribution.ModelParallel()": model_parallel,
    "gloo's options": lambda: importlib.import_module("torch.distributed").ProcessGroupGloo._Options(),
    "collections.namedtuple()": lambda: Name("", "", ""),
    "a jax array": lambda: importlib.import_module("jax.numpy").ones(1),
    "a jax device": lambda: importlib.import_module("jax").devices()[0],
    "jax's flags": lambda: importlib.import_module("jax").config,
}
LIBRARIES = ("jax", "torch", "tensorflow", "pyspark")
OF = {
    "gloo's options": "torch",
    "a jax array": "jax",
    "a jax device": "jax",
    "jax's flags": "jax",
}
SOURCE = "the source of "


def found_in(path):
    """Return the object at a dotted path: the longest part of it that is a module, and then attributes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            result = getattr(result, part)
        return result
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("entry", [*PRIVATE, *UNDOCUMENTED], ids=lambda entry: f"{entry.name}-{entry.home}")
def test_the_installed_version_has_the_name(entry, backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home, name = entry.home.removeprefix(SOURCE), entry.name
    library = OF.get(home, (home or name).split(".")[0])
    if library == "pyspark":
        pytest.importorskip("pyspark", reason="pyspark is not installed")
    elif library in LIBRARIES and library != backend:
        pytest.skip(f"tried where the backend is {library}")
    elif UNTIL.get(name, (9,)) <= tuple(map(int, keras.__version__.split(".")[:2])):
        pytest.skip(f"Keras {keras.__version__} no longer has it, and needs no care for it")
    elif name == "jax_state_sync" and backend != "jax":
        pytest.skip("Keras has it on JAX only")
    if name == "seed_generator_state":
        assert keras.layers.Dropout(0.5).seed_generator.state.name == name
    elif name == "epoch_iterator.py":
        file = sys.modules["keras.src.trainers.epoch_iterator"]
        assert file.__file__.endswith(name)
        assert file.EpochIterator.reset.__code__.co_filename.endswith(name)
    elif not home:
        module, _, part = name.partition(":")
        found_in(f"{module}.{part}" if part else module)
    elif entry.home.startswith(SOURCE):
        assert re.search(rf"\b{name}\b", inspect.getsource(found_in(home)))
    else:
        assert hasattr(EXAMPLES[home]() if home in EXAMPLES else found_in(home), name)


def test_keras_asks_for_the_logs_once_between_an_epochs_batches_and_its_validation():
    model, order = functional(), []
    plain = model._get_metrics_result_or_logs
    model.__dict__["_get_metrics_result_or_logs"] = lambda logs: order.append("logs") or plain(logs)

    class Order(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            order.append("batch")

        def on_test_begin(self, logs=None):
            order.append("validation")

        def on_epoch_end(self, epoch, logs=None):
            order.append("epoch")

    x, y = {"a": np.ones((4, 3)), "b": np.ones((4, 3))}, {"c": np.ones((4, 1))}
    model.fit(x, y, batch_size=2, epochs=2, validation_data=(x, y), callbacks=[Order()], verbose=0)
    assert order == ["batch", "batch", "logs", "validation", "logs", "epoch"] * 2


def test_the_losses_of_a_compiled_model_can_be_replaced():
    entry = functional()._compile_loss._flat_losses[0]
    assert entry._replace(loss=None).loss is None
    assert isinstance(entry.loss, keras.losses.Loss)
    assert "call" not in vars(entry.loss)


def test_the_loss_is_a_mean_and_the_first_metric():
    first = functional().metrics[0]
    assert (first.name, type(first)) == ("loss", keras.metrics.Mean)


def test_a_layout_map_matches_whole_paths():
    layout = keras.distribution.LayoutMap(model_parallel().device_mesh)
    layout["dense/kernel"] = (None, "model")
    assert layout["model/dense/kernel"] is None
    assert layout["dense/kernel"].axes == (None, "model")
