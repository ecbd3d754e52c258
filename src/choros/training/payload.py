"""The content of a fit as it is sent to ranks: metadata as JSON, data as arrays, code as pickles.

Ranks that a launcher starts never read a pickle (of the model without weights, a PyDataset, a decoder of files) from a
socket. The pickles are private files in a folder of the working directory, which all hosts share, or to which the
launcher copies them (``LaunchPreferences.files``). The connection with the caller carries only the folder's path and
the digest of each file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from choros import algorithms, pickling
from choros.algorithms import Algorithm, is_custom
from choros.backends.host_values import to_host
from choros.backends.optimizers import model_variables
from choros.comm.shm.segment import Segment
from choros.data import serialization
from choros.errors import InvalidInputError
from choros.launch.private_file import create_private, digest_of, read_private
from choros.training.async_control.best_member import best_of
from choros.training.checkpoint.snapshot import raw
from choros.training.model_io.serialization import PackedModel, copy_model
from choros.training.spec import FitConfig, FitRequest
from choros.training.worker.messages import DataLayout
from choros.types import Array

if TYPE_CHECKING:
    import keras

HOME = "CHOROS_HOME"  # environment variable with the caller's address and secret
CodeFiles = dict[str, Any]


@dataclass(frozen=True)
class FitPayload:
    """The data of a job.

    Attributes:
        model: the packed model.
        arrays: the arrays of the model, then those of the sources.
        blobs: pickles of the sources, then that of a custom algorithm's class.
    """

    model: PackedModel
    arrays: list[Array]
    blobs: list[bytes]

    def load(self, plan: FitRequest, on_this_host: bool = True) -> FitConfig:
        """Add the sources of a request and a custom algorithm to the payload. Return the job that describes them.

        Args:
            plan: the request.
            on_this_host: whether all workers run on this machine, so that they share decoded files.
        """
        source, *_ = serialization.pack(plan.source, self.arrays, self.blobs, on_this_host)
        validation = None
        if plan.validation is not None:
            validation, *_ = serialization.pack(plan.validation, self.arrays, self.blobs, on_this_host)
        code = None
        if pickled := pack_algorithm(plan.algorithm):
            code = len(self.blobs)
            self.blobs.append(pickled)
        return replace(plan.job, source=source, validation=validation, algorithm_code=code)


def load_payload(request: FitRequest, on_this_host: bool) -> tuple[FitRequest, FitPayload]:
    """Return a request whose job describes its data, and the data.

    Args:
        request: FitRequest.
        on_this_host: bool. Whether all ranks run on this machine, so that they share decoded files.
    """
    payload = FitPayload(request.written, [*request.written.arrays], [])
    return replace(request, job=payload.load(request, on_this_host)), payload


def pack_algorithm(algorithm: Algorithm) -> bytes:
    """Return the pickle of a custom algorithm's class, by value where workers could not import it; else no bytes.

    Raises:
        NotSerializableError: the class cannot be pickled.
    """
    algorithm_class = type(algorithm)
    if not is_custom(algorithm):
        return b""
    try:
        return pickling.dumps(algorithm_class)
    except Exception as error:
        raise pickling.refusal(
            f"The algorithm {algorithm_class.__name__}", algorithm_class, algorithm_class.__name__, error
        ) from error


def unpack_algorithm(job: FitConfig, blobs: Sequence[bytes]) -> Algorithm:
    """Return the bound algorithm of a job.

    Args:
        job: describes the algorithm.
        blobs: the pickles of the payload, without the model's. They must come from processes of this user.
    """
    algorithm_class = None if job.algorithm_code is None else pickling.loads(blobs[job.algorithm_code])
    return algorithms.from_config(job.algorithm, algorithm_class)


def unpack_sources(job: FitConfig, arrays: Sequence[Array], blobs: Sequence[bytes]) -> tuple[Any, Any]:
    """Return the source of training batches and that of validation batches; the second is None without validation.

    Args:
        job: describes the sources.
        arrays: the arrays of the payload.
        blobs: pickles of the sources. They must come from processes of this user.
    """
    validation = None if job.validation is None else serialization.unpack(job.validation, arrays, blobs)
    return serialization.unpack(job.source, arrays, blobs), validation


def unpack_payload(
    job: FitConfig, layout: DataLayout, code: Sequence[bytes], data: Segment
) -> tuple[Any, Any, PackedModel]:
    """Return the two sources of ``unpack_sources``, and the packed model.

    Args:
        job: describes the sources.
        layout: the layout of all arrays.
        code: the model's pickle, then the sources' pickles.
        data: the shared memory of the arrays.
    """
    arrays = serialization.views(layout.entries, data.array(np.uint8, data.nbytes, 0))
    model, *blobs = code
    return *unpack_sources(job, arrays, blobs), PackedModel(model, arrays[: layout.model_arrays], layout.foreign)


class SharedCodeFolder:
    """Private files of code in the working directory, which ranks on other hosts read. ``close`` removes them.

    Args:
        code: the content of each file.

    Attributes:
        files: the argument of ``read_code``: the folder's path and the SHA-256 digest of each file.

    Raises:
        InvalidInputError: the working directory cannot be written.

    Example:
        >>> with SharedCodeFolder([b"one", b"two"]) as folder:
        ...     read_code(folder.files)
        [b'one', b'two']
    """

    def __init__(self, code: Sequence[bytes]) -> None:
        try:
            self._folder = tempfile.mkdtemp(prefix=".choros-", dir=os.getcwd())
        except OSError as error:
            raise InvalidInputError(
                f"The ranks that a launcher starts find the model's code in the working directory, and {os.getcwd()} "
                f"cannot be written to ({error.strerror}): start from a directory that all hosts share."
            ) from None
        for number, text in enumerate(code):
            with open(create_private(os.path.join(self._folder, str(number))), "wb") as file:
                file.write(text)
        self.files: CodeFiles = {"folder": self._folder, "digests": [digest_of(text) for text in code]}

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files."""
        return tuple(os.path.join(self._folder, str(number)) for number in range(len(self.files["digests"])))

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SharedCodeFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_code(code_files: CodeFiles) -> list[bytes]:
    """Return the content of the files in a ``SharedCodeFolder``.

    Raises:
        InvalidInputError: a file cannot be read, is not private to this user, or has another digest.
    """
    files = []
    for number, digest in enumerate(code_files["digests"]):
        path = os.path.join(code_files["folder"], str(number))
        try:
            files.append(read_private(path, "the process that called fit", digest))
        except OSError as error:
            raise InvalidInputError(
                f"{os.uname().nodename} cannot read {path} ({error.strerror}), where the process that called fit left "
                "the model's code: start that process in a directory that all hosts share."
            ) from None
    return files


def shown(model: keras.Model) -> list[Array]:
    """Return the variables of the model and its optimizer as flat uint8 arrays, for a connection."""
    return raw(to_host(model_variables(model)))


def put(model: keras.Model, arrays: list[Array]) -> None:
    """Set a model's variables to the values that ``shown`` returned; fewer arrays set the first variables only."""
    for variable, buffer in zip(model_variables(model), arrays, strict=False):
        current = to_host([variable])[0]
        variable.assign(np.array(buffer).view(current.dtype).reshape(current.shape))


def unpack_members(model: keras.Model, scores: Sequence[float], weights: Sequence[list[Array]]) -> list[Any]:
    """Return the models of an Ensemble's members, and set the given model to the best member's variables.

    Args:
        model: the model given to the Trainer.
        scores: for each member, the loss by which members are compared.
        weights: for each member, the result of ``shown`` for its model.
    """
    models = [copy_model(model) for _ in weights]
    for member, arrays in zip(models, weights, strict=True):
        put(member, arrays)
    put(model, weights[best_of(scores)])
    return models
