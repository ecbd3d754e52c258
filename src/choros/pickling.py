"""Pickling of Python objects by value, including Keras models with all their attributes.

``cloudpickle`` writes functions and classes of ``__main__`` by value. Keras pickles a model as a ``.keras`` file, which
loses everything that ``get_config()`` does not return. The pickler of this module instead writes each layer, optimizer,
metric and loss with its attributes. The values of variables can be kept outside of the pickle, as a list of arrays.

Unpickling runs code, so ``loads`` must only get bytes from processes of the same user.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import io
import os
import pickle
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from choros.errors import NotSerializableError, brief
from choros.object_graph import children
from choros.types import Array, dtype_of

if TYPE_CHECKING:
    import keras
    import torch

# Attributes of a keras.Model that fit, evaluate and predict make again.
_REBUILT_FUNCTIONS = ("train_function", "test_function", "predict_function")
_ID_ATTRIBUTES = (
    "stored_ids",
    "_trainable_variables_indices",
    "_exclude_from_weight_decay_cache",
)  # hold ids, which are addresses of objects
# TensorFlow's attributes of trackable objects, by name: KerasHub has other attributes that begin with _self_.
_TRACKABLE_ATTRIBUTES = frozenset(
    {
        "_self_last_wrapped_dict_snapshot",
        "_self_name_based_restores",
        "_self_saveable_object_factories",
        "_self_tracked_trackables",
        "_self_unconditional_checkpoint_dependencies",
        "_self_unconditional_deferred_dependencies",
        "_self_unconditional_dependency_names",
        "_self_update_uid",
    }
)
_PER_CALL = ("_eval_epoch_iterator", "_jax_state", "history", "stop_evaluating", "stop_predicting")
_COMPILED_CALL = "_compiled_call_impl"  # of a Module of PyTorch, which does not pickle it
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_LEAF_TYPES = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType)
_TENSORFLOW_WRAPPERS = {"_DictWrapper": dict, "ListWrapper": list, "_TupleWrapper": tuple}  # TensorFlow's wrappers
UnpicklingError = pickle.UnpicklingError  # raised for an object that cannot be read
_loading = threading.local()
_received: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()  # names of a class's attributes


def dump(thing: object, file: object) -> None:
    """Write any object into a file, with the values of its variables.

    Args:
        thing: any object that cloudpickle can pickle; it may contain Keras models.
        file: a binary file.

    Raises:
        Exception: the exception of an object's ``__reduce__``.
    """
    if "keras.src" not in sys.modules:
        cloudpickle.dump(thing, file)
        return
    ModelPickler(file, None).dump_all(thing)


def dumps(thing: object) -> bytes:
    """Return an object as bytes; see ``dump``."""
    buffer = io.BytesIO()
    dump(thing, buffer)
    return buffer.getvalue()


class Dump(NamedTuple):
    """A pickle without values of variables, and the values that its reader does not have, with their variables' ids."""

    code: bytes
    arrays: list[Array]
    owners: list[int]


def dump_with_arrays(thing: object, known: Sequence[Any] = (), limit: int | None = None) -> Dump:
    """Return an object as a pickle without values of variables, and the values that the reader does not have.

    Args:
        thing: the object.
        known: variables whose values the reader has, in this order.
        limit: the largest size of the pickle in bytes. Defaults to None, no limit.

    Raises:
        TooLargeError: the pickle is larger than the limit.
        Exception: the exception of an object's ``__reduce__``.
    """
    buffer = _LimitedBuffer()
    buffer.limit = limit
    pickler = ModelPickler(buffer, known)
    pickler.dump_all(thing)
    return Dump(buffer.getvalue(), pickler.arrays, pickler.owners)


def loads(
    data: Any,
    arrays: Sequence[Array] = (),
    known: Sequence[Array] | None = (),
    lent: Collection[int] = (),
    wait: Callable[[int], None] | None = None,
) -> Any:
    """Return the object that ``dump`` or ``dump_with_arrays`` wrote.

    Args:
        data: bytes from processes of the same user, or a memory-mapped file, which is read from its position on.
        arrays: the list of arrays from ``dump_with_arrays``.
        known: the values of the known variables, in their order; None sets these variables to zero.
        lent: indices in ``known`` of arrays whose memory variables may share; all other values are copied.
        wait: called with an index in ``known`` before that array is read; returns when the array has its values.
    """
    before = getattr(_loading, "values", None)
    _loading.values = known, arrays, lent, wait
    try:
        file, size = (data, len(data)) if hasattr(data, "read") else (io.BytesIO(data), len(data))
        unpickler = pickle.Unpickler(file)
        result = unpickler.load()
        loaded = []
        while file.tell() < size:
            part, state = unpickler.load()
            set_state(part, state)
            loaded.append(part)
    finally:
        _loading.values = before
    for part in loaded:
        restore_identities(part)
    return result


class TooLargeError(NotSerializableError):
    """Pickle that is larger than its limit."""


class _LimitedBuffer(io.BytesIO):
    limit: int | None = None

    def write(self, data: Any) -> int:
        if self.limit is not None and self.tell() + memoryview(data).nbytes > self.limit:
            raise TooLargeError(f"The pickle is larger than {self.limit >> 20} MB.")
        return super().write(data)


class ModelPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that writes an object graph as a sequence of pickles with one memo.

    The first pickle holds the object itself, with Keras objects as empty shells. The attributes of each shell follow in
    a separate pickle. So the depth of the recursion does not grow with the depth of a model.

    Args:
        file: the file to write to.
        known: variables whose values the reader has; None writes all values into the pickle.

    Attributes:
        arrays: the values of all other variables.
        owners: the ids of these variables, or of PyTorch's parameters.
    """

    def __init__(self, file: Any, known: Sequence[Any] | None = ()) -> None:
        super().__init__(file, protocol=5)
        import keras
        from keras.src.models.functional import Functional
        from keras.src.ops.node import Node
        from keras.src.saving.keras_saveable import KerasSaveable
        from keras.src.utils.backend_utils import DynamicBackend
        from keras.src.utils.tracking import Tracker

        self.dynamic, self.functional = DynamicBackend, Functional
        self.variable, self.saveable, self.model = keras.Variable, KerasSaveable, keras.Model
        self.shells = (Tracker, Node, keras.KerasTensor)
        self.plain = _tracked_containers()
        self.inline, known = known is None, known or ()
        self.known = {id(variable): index for index, variable in enumerate(known)}
        if keras.backend.backend() == "torch":  # a Parameter belongs to a variable, and also to PyTorch's modules
            self.known |= {id(variable._value): index for index, variable in enumerate(known)}
        self.variables = known
        self.queue: deque[Any] = deque()
        self.arrays: list[Array] = []
        self.owners: list[int] = []
        module_of_torch = getattr(sys.modules.get("torch"), "nn", None)
        self.parameter: type[torch.nn.Parameter] | tuple[()] = getattr(module_of_torch, "Parameter", ())
        kinds = (object, getattr(module_of_torch, "Module", object))  # on PyTorch a layer is a Module
        self.standard_getstates = [getattr(kind, "__getstate__", None) for kind in kinds]

    def dump_all(self, thing: object) -> None:
        """Write an object, then the attributes of all Keras objects that can be reached from it."""
        with _modules_by_value() as self.by_value:
            self.dump(thing)
            while self.queue:
                part = self.queue.popleft()
                self.dump((part, self.state_of(part)))

    def reducer_override(self, obj: object) -> Any:
        """Return how an object is written; see ``pickle.Pickler.reducer_override``."""
        kind = type(obj)
        if isinstance(obj, self.variable):
            return object.__new__, (kind,), self.variable_state(obj), None, None, set_variable
        if self.parameter and isinstance(obj, self.parameter):
            return new_parameter, (kind, *self.value_of(obj), obj.requires_grad)
        if isinstance(obj, self.saveable) and kind.__reduce__ is self.saveable.__reduce__:
            self.queue.append(obj)
            return new_shell, (kind, isinstance(obj, self.functional))
        if isinstance(obj, self.shells):
            self.queue.append(obj)
            return object.__new__, (kind,)
        if kind in self.plain:
            plain = self.plain[kind]
            return kind.__new__, (kind,), (plain, plain(obj), dict(obj.__dict__)), None, None, set_tracked
        if kind in _LOCKS and not self.inline:  # inside a model; elsewhere a copy would not exclude other ranks
            return _LOCKS[kind], ()
        if isinstance(obj, weakref.ref):
            return weakref.ref, (set() if obj() is None else obj(),)  # nothing keeps the set: a dead reference
        if isinstance(obj, self.dynamic):  # its __getattr__ needs an attribute that __init__ sets
            return kind, (obj._backend,)
        if isinstance(obj, functools._lru_cache_wrapper):
            return new_cache, (obj.__wrapped__, obj.cache_parameters())
        if kind.__module__.startswith("tensorflow."):
            reduced = _reduce_tensorflow(obj, kind)
            if reduced is not None:
                return reduced
        if isinstance(obj, (types.FunctionType, type)):
            self.by_value(obj.__module__)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # a class by value
            make, arguments, state, *_, setter = reduced
            # The names as one text: pickles of an unchanged class must have equal bytes, whichever strings are shared.
            return make, arguments, (" ".join(vars(obj)), setter, state), None, None, set_class
        return reduced

    def variable_state(self, variable: keras.Variable) -> tuple[dict[str, Any], Any]:
        """Return a variable's attributes, and its value: a Parameter, or the reference from ``value_of``."""
        left_out = {"_value", "_layout", *_TRACKABLE_ATTRIBUTES}
        state = {name: value for name, value in vars(variable).items() if name not in left_out}
        value = variable._value
        if value is not None and not (self.parameter and isinstance(value, self.parameter)):
            value = self.value_of(variable)
        return state, value

    def value_of(self, variable: keras.Variable | torch.nn.Parameter) -> tuple[Any, ...]:
        """Return a reference to a value: (whether the reader has it, index, shape, dtype).

        The index is that in ``known``, or in ``arrays``. If values go into the pickle, the array replaces the bool.
        """
        import keras

        form = tuple(map(int, variable.shape)), keras.backend.standardize_dtype(variable.dtype)
        if (index := self.known.get(id(variable))) is not None:
            return True, index, *form
        value = getattr(variable, "_value", variable)
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if self.inline:
            return array, 0, *form
        self.arrays.append(array)
        self.owners.append(id(variable))
        return False, len(self.arrays) - 1, *form

    def state_of(self, part: Any) -> Any:
        """Return the attributes of a Keras object, without those that calls make again and without addresses."""
        if getattr(type(part), "__getstate__", None) not in self.standard_getstates:
            return part.__getstate__()
        is_model = isinstance(part, self.model)
        left_out = {_COMPILED_CALL, *_ID_ATTRIBUTES, *_TRACKABLE_ATTRIBUTES, *(_PER_CALL if is_model else ())}
        state = {name: value for name, value in vars(part).items() if name not in left_out}
        if is_model:
            state |= {name: None for name in _REBUILT_FUNCTIONS if name in state}
        if "_loss_ids" in state:
            state |= {"_losses": [], "_loss_ids": set()}
        if excluded := state.get("_exclude_from_weight_decay"):
            variables = {
                part._var_key(variable): variable for variable in (*part._trainable_variables, *self.variables)
            }
            state["_exclude_from_weight_decay"] = [variables[key] for key in excluded if key in variables]
        return state


def new_shell(kind: Any, functional: bool) -> Any:
    """Return a Keras object without attributes.

    A user's class of functional models may not have ``Functional`` among its bases in this process yet: Keras inserts
    it when it makes the first model of inputs and outputs.
    """
    from keras.src.models.functional import Functional
    from keras.src.models.model import inject_functional_model_class

    if functional and not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    return object.__new__(kind)


def set_state(part: Any, state: Any) -> None:
    """Set the attributes of a Keras object."""
    setstate = getattr(type(part), "__setstate__", None)
    vars(part).update(state) if setstate is None else setstate(part, state)


def restore_identities(part: Any) -> None:
    """Rebuild the attributes in which Keras keeps addresses of an object's parts, once all parts are loaded."""
    from keras.src.ops.function import Function, map_graph
    from keras.src.utils.tracking import Tracker

    state = vars(part)
    if isinstance(part, Tracker):
        part.stored_ids = {name: {id(value) for value in store} for name, (_, store) in part.config.items()}
    elif isinstance(part, Function):
        state["_nodes"] = map_graph(state["_inputs"], state["_outputs"])[0]
    elif hasattr(type(part), "_var_key") and "_trainable_variables" in state:
        trained = state["_trainable_variables"]
        state["_trainable_variables_indices"] = {part._var_key(v): index for index, v in enumerate(trained)}
        if "_exclude_from_weight_decay" in state:
            state["_exclude_from_weight_decay"] = {part._var_key(v) for v in state["_exclude_from_weight_decay"]}


def set_class(kind: type, state: tuple[str, Callable[[type, Any], Any], Any]) -> None:
    """Set the attributes of a class that was sent by value, and delete those that the sender has deleted since.

    A process that received the class earlier still has it, with its earlier attributes.

    Args:
        kind: the class.
        state: the names of the sender's attributes, cloudpickle's function that sets attributes, its argument.
    """
    names, setter, values = state
    attributes = set(names.split())
    for name in _received.get(kind, attributes) - attributes:
        if name in vars(kind):
            delattr(kind, name)
    _received[kind] = attributes
    setter(kind, values)


def set_variable(variable: keras.Variable, state: tuple[dict[str, Any], Any]) -> None:
    """Set the attributes of a variable, and its value on a device of this process."""
    attributes, value = state
    variable.__dict__.update(attributes)
    variable.__dict__["_value"] = None
    variable.__dict__["_layout"] = None  # Keras sets a new layout if this process has a distribution
    if isinstance(value, tuple):
        value = variable._convert_to_tensor(_array(*value), dtype=variable._dtype)
    if value is not None:
        variable._initialize(value)


def new_parameter(
    kind: Any, source: bool | Array, index: int, shape: tuple[int, ...], dtype: str, requires_grad: bool
) -> Any:
    """Return a PyTorch Parameter with its value."""
    import keras

    tensor = keras.ops.convert_to_tensor(_array(source, index, shape, dtype), dtype=dtype)
    return kind(tensor, requires_grad=requires_grad)


def _array(source: bool | Array, index: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a variable's value, an array or a tensor; copied unless its memory is lent, as the memory may change.

    Args:
        source: the value itself, or whether it is among the known values.
        index: the index among the known values, or in the list of arrays.
        shape: the shape of the value.
        dtype: the name of the value's dtype.
    """
    known, shared, lent, wait = _loading.values
    if not isinstance(source, bool):
        return source.reshape(shape)
    if source and known is None:
        return np.zeros(shape, dtype_of(dtype))
    if source and wait is not None:
        wait(index)
    pool = (known if source else shared)[index]
    import keras

    module = importlib.import_module(f"choros.backends.{keras.backend.backend()}")
    if source and index in lent:
        return module.shared(pool.reshape(shape))
    return module.copied(pool.reshape(shape))


def set_tracked(container: Any, state: tuple[Any, Any, dict[str, Any]]) -> None:
    """Fill a tracked container of Keras by the methods of its plain base class: its methods need the tracker."""
    plain, values, attributes = state
    vars(container).update(attributes)
    (plain.extend if plain is list else plain.update)(container, values)


def new_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Return a function with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def _tracked_containers() -> dict[type, type]:
    from collections import OrderedDict

    from keras.src.utils import tracking

    return {
        tracking.TrackedList: list,
        tracking.TrackedDict: dict,
        tracking.TrackedOrderedDict: OrderedDict,
        tracking.TrackedSet: set,
    }


def _reduce_tensorflow(thing: Any, kind: type) -> Any:
    """Return the reduced form of a TensorFlow object that pickle cannot write; None for all other objects."""
    if "Strategy" in kind.__name__ and kind.__module__.startswith("tensorflow.python.distribute"):
        return current_strategy, ()
    if kind.__name__ == "Function" and hasattr(thing, "_clone"):  # a tf.function, without its traces
        return thing._clone(None).__reduce_ex__(4)
    if kind.__name__ in _TENSORFLOW_WRAPPERS:
        plain = _TENSORFLOW_WRAPPERS[kind.__name__]
        return plain, (plain(thing),)
    if kind.__name__ == "StaticHashTable":
        keys, values = (array.numpy() for array in thing.export())
        default = thing.default_value.numpy()
        return new_table, (kind, keys, values, thing.key_dtype, thing.value_dtype, default)
    if kind.__name__ == "MutableHashTable":  # in which an adapted lookup layer of Keras counts words
        keys, values = (array.numpy() for array in thing.export())
        form = thing.key_dtype, thing.value_dtype, thing._default_value.numpy()
        return new_mutable_table, (kind, keys, values, *form)
    return None


def current_strategy() -> Any:
    """Return TensorFlow's distribution strategy of this process."""
    return importlib.import_module("tensorflow").distribute.get_strategy()


def new_table(kind: Any, keys: Array, values: Array, key_dtype: Any, value_dtype: Any, default: Any) -> Any:
    """Return a TensorFlow lookup table."""
    lookup = sys.modules[kind.__module__]
    initializer = lookup.KeyValueTensorInitializer(keys, values, key_dtype, value_dtype)  # type: ignore[attr-defined]
    return kind(initializer, default)


def new_mutable_table(kind: Any, keys: Array, values: Array, key_dtype: Any, value_dtype: Any, default: Any) -> Any:
    """Return a TensorFlow lookup table to which keys can be added."""
    table = kind(key_dtype, value_dtype, default)
    if len(keys):  # an empty array of objects is not a tensor of text
        table.insert(keys, values)
    return table


@contextmanager
def _modules_by_value() -> Iterator[Callable[[Any], None]]:
    """Pickle by value, within the context, modules that a new process with this ``sys.path`` cannot import.

    It yields a function that registers the module of a given name if necessary.
    """
    registered: list[Any] = []
    seen = {"__main__", None}
    folders = tuple(os.path.abspath(folder) for folder in sys.path)

    def check(name: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        module = sys.modules.get(name)
        if module is None or name in cloudpickle.list_registry_pickle_by_value():
            return
        if _imports_file(name, getattr(module, "__file__", None), folders):
            return
        cloudpickle.register_pickle_by_value(module)
        registered.append(module)

    try:
        yield check
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _imports_file(name: str, file: str | None, folders: tuple[str, ...]) -> bool:
    """Return whether a new process with these folders on ``sys.path`` imports a module from the same file as this one.

    Args:
        name: the module's name.
        file: the module's file; None if it has none.
        folders: absolute paths.
    """
    top, *parts = name.split(".")
    if top in sys.stdlib_module_names:
        return True
    spec = importlib.machinery.PathFinder.find_spec(top, list(folders))
    if spec is None:
        return False
    full = top
    for part in parts:
        full += f".{part}"
        locations = spec.submodule_search_locations
        inner = None if locations is None else importlib.machinery.PathFinder.find_spec(full, list(locations))
        if inner is None:  # its package makes it at the import, as ``six.moves``
            return True
        spec = inner
    if file is None or spec.origin is None or not spec.has_location:
        return True
    # A script may have loaded the module by its path, and another file has its name on ``sys.path``.
    return os.path.realpath(spec.origin) == os.path.realpath(file)


# -- what cannot be written
def culprit(root: object, name: str, size: int | None = None) -> tuple[str, Any, Exception | int | None]:
    """Find the innermost part of an object that cannot be pickled, or that is large.

    Args:
        root: the object.
        name: the object's name in the result.
        size: the size in bytes above which a part is large. Defaults to None, to find a part that cannot be pickled.

    Returns:
        The part's path in Python syntax, the part, and its exception or its size in bytes.
    """
    place, part, reason = name, root, _cost(root, set())
    seen = {id(root)}
    while True:
        children = [
            child for child in _parts(part) if id(child[1]) not in seen and not isinstance(child[1], _LEAF_TYPES)
        ]
        costs = ((label, child, _cost(child, seen)) for label, child in children)
        best = next((child for child in costs if _is_reason(child[2], size)), None)
        if best is None:
            return place, part, reason
        place, part, reason = place + best[0], best[1], best[2]
        seen.add(id(part))


def _is_reason(cost: Exception | int, size: int | None) -> bool:
    return isinstance(cost, Exception) if size is None else isinstance(cost, int) and cost > size


def refusal(what: str, root: object, name: str, error: Exception) -> NotSerializableError:
    """Return the error for an object that cannot be pickled; it names the part that is the cause.

    Args:
        what: the beginning of the message, as "The model 'm'".
        root: the object.
        name: the object's name in the message.
        error: the exception of pickling the object.
    """
    place, part, reason = culprit(root, name)
    cause = brief(reason if isinstance(reason, Exception) else error)
    kind = type(part).__qualname__
    return NotSerializableError(
        f"{what} cannot be sent to a worker: {place}, a {kind}, cannot be pickled ({cause}). Make it where it is used, "
        "or delete it before fit."
    )


class _Probe(ModelPickler):
    """Pickler that measures an object, without some parts and without values of variables."""

    def __init__(self, file: object, apart: set[int]) -> None:
        super().__init__(file)
        self.apart = apart

    def persistent_id(self, thing: object) -> Any:
        return 0 if id(thing) in self.apart else None

    def value_of(self, variable: keras.Variable | torch.nn.Parameter) -> tuple[Any, ...]:
        return False, 0, (), ""  # values do not count


def _cost(item: object, apart: set[int]) -> Exception | int:
    buffer = io.BytesIO()
    try:
        _Probe(buffer, apart).dump_all(item)
    except Exception as error:  # an object's __reduce__ may raise any exception
        return error
    return buffer.tell()


def _parts(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object with their paths: first layers, then public attributes, then private ones."""
    layers = getattr(thing, "layers", None)
    if isinstance(layers, list):
        yield from ((f".layers[{number}]", layer) for number, layer in enumerate(layers))
    for label, part in sorted(children(thing), key=lambda item: item[0].startswith("._")):
        if label.removeprefix(".") not in _TRACKABLE_ATTRIBUTES:
            yield label, part
