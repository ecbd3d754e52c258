"""A fit as it travels to ranks that something else starts: facts as JSON, data as arrays, code in files of its owner's.

A pickle (the model without its weights, a PyDataset, what decodes files) is never taken from a socket. It lies in a
folder of the caller's own in the working directory, which all hosts have; the line to the caller tells where, and each
file's digest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.backends.host_values import to_host
from choros.backends.optimizers import model_variables
from choros.comm.shm.segment import Segment
from choros.data import serialization
from choros.errors import InvalidInputError
from choros.training.async_control.best_member import best_of
from choros.training.checkpoint.snapshot import raw
from choros.training.model_io.serialization import PackedModel, copy_model
from choros.training.spec import FitConfig, FitRequest
from choros.types import Array

HOME = "CHOROS_HOME"  # where the caller waits, and its secret
Told = dict[str, Any]


@dataclass(frozen=True)
class FitPayload:
    """The data of a job: the model's pickle, arrays of the model and then of the sources, and sources' blobs."""

    model: PackedModel
    arrays: list[Array]
    blobs: list[bytes]

    def load(self, plan: FitRequest, here: bool = True) -> FitConfig:
        """Take a plan's sources apart; returns its job, which then says where their parts are.

        Args:
            plan: what to do.
            here: whether it is for workers of this machine, with which files share what they decode.
        """
        source, *_ = serialization.pack(plan.source, self.arrays, self.blobs, here)
        validation = None
        if plan.validation is not None:
            validation, *_ = serialization.pack(plan.validation, self.arrays, self.blobs, here)
        return replace(plan.job, source=source, validation=validation)


def load_payload(request: FitRequest, here: bool) -> tuple[FitRequest, FitPayload]:
    """Return a request whose job describes its data, and the data.

    Args:
        request: FitRequest.
        here: bool. Whether all ranks run on this machine, and so share what they decode of files.
    """
    payload = FitPayload(request.written, [*request.written.arrays], [])
    return replace(request, job=payload.load(request, here)), payload


def unpack_sources(job: FitConfig, arrays: Sequence[Array], blobs: Sequence[bytes]) -> tuple[Any, Any]:
    """Return the sources of batches to train on and to validate with; the second is None where there is none.

    Args:
        job: describes the sources.
        arrays: the arrays of the payload.
        blobs: the sources' code, from this user's own processes only.
    """
    validation = None if job.validation is None else serialization.unpack(job.validation, arrays, blobs)
    return serialization.unpack(job.source, arrays, blobs), validation


def unpack_payload(
    job: FitConfig, message: dict[str, Any], code: Sequence[bytes], data: Segment
) -> tuple[Any, Any, PackedModel]:
    """Return the sources that ``unpack_sources`` returns, and the model.

    Args:
        job: describes the sources.
        message: the layout of all "arrays", of which the first "model_arrays" belong to the model.
        code: the model's pickle, then the sources' code.
        data: the shared memory of the arrays.
    """
    arrays = serialization.views(message["arrays"], data.array(np.uint8, data.nbytes, 0))
    model, *blobs = code
    return *unpack_sources(job, arrays, blobs), PackedModel(model, arrays[: message["model_arrays"]])


class SharedCodeFolder:
    """Code where ranks on other hosts find it, until it is closed.

    Args:
        code: what each file holds.

    Attributes:
        told: what ``read_code`` needs.

    Raises:
        InvalidInputError: nothing can be written into the working directory.

    Example:
        >>> with SharedCodeFolder([b"one", b"two"]) as folder:
        ...     read_code(folder.told)
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
            place = os.open(os.path.join(self._folder, str(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(place, "wb") as file:
                file.write(text)
        self.told: Told = {"folder": self._folder, "digests": [hashlib.sha256(text).hexdigest() for text in code]}

    def close(self) -> None:
        """Take it away."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SharedCodeFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_code(told: Told) -> list[bytes]:
    """Return what the caller left in its folder.

    Raises:
        InvalidInputError: it is not there, is not this user's alone, or is not what the caller wrote.
    """
    found = []
    for number, digest in enumerate(told["digests"]):
        path, host = os.path.join(told["folder"], str(number)), os.uname().nodename
        try:
            with open(path, "rb") as file:
                facts = os.fstat(file.fileno())
                text = file.read()
        except OSError as error:
            raise InvalidInputError(
                f"{host} cannot read {path} ({error.strerror}), where the process that called fit left the model's "
                "code: start that process in a directory that all hosts share."
            ) from None
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise InvalidInputError(
                f"On {host} {path} belongs to somebody else, or others may write it: it is not taken."
            )
        if hashlib.sha256(text).hexdigest() != digest:
            raise InvalidInputError(
                f"On {host} {path} is not what the process that called fit wrote there: it is not taken."
            )
        found.append(text)
    return found


def shown(model: Any) -> list[Array]:
    """Return the model's variables and the optimizer's, as bytes for a line."""
    return raw(to_host(model_variables(model)))


def put(model: Any, arrays: list[Array]) -> None:
    """Give as many of a model's variables the values that ``shown`` made bytes of."""
    for variable, buffer in zip(model_variables(model), arrays, strict=False):
        before = to_host([variable])[0]
        variable.assign(np.array(buffer).view(before.dtype).reshape(before.shape))


def unpack_members(model: Any, scores: Sequence[float], weights: Sequence[list[Array]]) -> list[Any]:
    """Return the models of an Ensemble's members, and give the best member's weights to the given model.

    Args:
        model: the given model.
        scores: of each member, the loss by which members are compared.
        weights: of each member, what ``shown`` made of its model.
    """
    models = [copy_model(model) for _ in weights]
    for member, arrays in zip(models, weights, strict=True):
        put(member, arrays)
    put(model, weights[best_of(scores)])
    return models
