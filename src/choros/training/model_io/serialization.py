"""A compiled model for another process: a pickle without weights, and arrays.

The values of the model's variables are sent separately, as the weights of the fit. The pickle is sent over the
parent's private socket pair, in the private folder for a launcher's ranks, or in Spark's closure. It is never sent over
a socket with an address. The versions of Python and of the packages on which the pickle depends are sent as JSON. They
are compared before the pickle is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from choros import pickling
from choros.backends.host_values import to_host
from choros.errors import ChorosError, NotSerializableError, brief
from choros.types import Array

_MAX_BYTES = 64 << 20  # of a model without weights; a larger one holds data


@dataclass(frozen=True)
class PackedModel:
    """A model for another process.

    Attributes:
        code: the pickle. It must come from a process of this user.
        arrays: values of variables that do not belong to the model, such as those of a teacher that its loss uses, and
            of its metrics.
        foreign: int. Number of these arrays without those of metrics.
    """

    code: bytes = b""
    arrays: list[Array] = field(default_factory=list)
    foreign: int = 0

    def unpack(
        self,
        weights: Sequence[Array] | None = None,
        lent: Collection[int] = (),
        wait: Callable[[int], None] | None = None,
    ) -> Any:
        """Return the model.

        Args:
            weights: values of the model's variables, in the order of ``model_variables``. None leaves them at zero.
            lent: indices of the weights whose memory the model may use. All others are copied.
            wait: called with an index before that weight is read; returns when the weight has its values.

        Raises:
            UnpicklingError: an object of the model cannot be read; the cause is the exception that its class raised.
        """
        try:
            return pickling.loads(self.code, self.arrays, weights, lent, wait)
        except ChorosError:
            raise
        except Exception as error:  # a class of the user's may raise any exception
            raise pickling.UnpicklingError(f"The model cannot be read from its pickle: {brief(error)}") from error


def pack_model(model: Any) -> PackedModel:
    """Return a model packed for another process.

    Args:
        model: keras.Model.

    Raises:
        NotSerializableError: an object that the model holds cannot be pickled, or is too large; the message names it.
    """
    name = f"The model {model.name!r}"
    try:
        written = pickling.dump_with_arrays(model, _own_variables(model), _MAX_BYTES)
    except pickling.TooLargeError:
        path, part, size = pickling.culprit(model, "model", _MAX_BYTES // 4)
        size_text = f"{size >> 20} MB" if isinstance(size, int) else "more"
        raise NotSerializableError(
            f"{name} would be sent to each worker with more than {_MAX_BYTES >> 20} MB beside its weights: {path}, a "
            f"{type(part).__name__}, brings {size_text}. Give data to fit, or load them from a file where they are "
            "used."
        ) from None
    except Exception as error:  # an object's __reduce__ may raise any exception
        raise pickling.refusal(name, model, "model", error) from error
    metric_ids = {id(variable) for variable in model.metrics_variables}
    metric_ids |= {id(variable._value) for variable in model.metrics_variables}  # a parameter of PyTorch
    return PackedModel(written.code, written.arrays, sum(owner not in metric_ids for owner in written.owners))


def copy_model(model: Any) -> Any:
    """Return a copy of a model, with its weights, its optimizers and all objects that it holds.

    Raises:
        NotSerializableError: an object that the model holds cannot be pickled.
    """
    written, weights = pack_with_weights(model)
    return written.unpack(weights)


def pack_with_weights(model: Any) -> tuple[PackedModel, list[Array]]:
    """Return a model packed for another process, and the values of its variables."""
    weights = to_host(_own_variables(model))
    return pack_model(model), weights


def _own_variables(model: Any) -> list[Any]:
    from choros.backends.optimizers import model_variables  # imported late: it loads Keras, which fixes the backend

    return model_variables(model) if getattr(model, "optimizer", None) is not None else list(model.variables)
