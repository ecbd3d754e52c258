"""The settings that shorten the waits for data, by the kind of data that a fit reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choros.data import FileSource, StreamSource, py_dataset_of

if TYPE_CHECKING:
    from choros.training.run_record import WorkerRecord

_MIN_SAVED_SHARE = 0.05  # of the training time: a setting that saves less is not named
_MAX_THREADS = 32  # that are advised


@dataclass(frozen=True)
class DataKind:
    """The kind of the data of a fit, for the advice of ``RunRecord.bottlenecks``.

    Attributes:
        kind: str. "arrays", "files", "PyDataset", "tf.data.Dataset", "DataLoader" or "stream".
        name: str. The class of a stream or of a PyDataset; else empty.
        readers: int. The threads of a PyDataset, or the processes of a DataLoader, that read; 0 or 1 for none.
        read_ahead: bool. Whether the process that called ``fit`` reads batches during steps.
        augment: bool. Whether ``choros.prefetch`` calls an ``augment``.
    """

    kind: str = "arrays"
    name: str = ""
    readers: int = 0
    read_ahead: bool = False
    augment: bool = False

    @classmethod
    def of(cls, source: Any, read_ahead: bool = False) -> DataKind:
        """Return the kind of a source.

        Args:
            source: Source.
            read_ahead: bool. Whether the process that called ``fit`` reads streams for the workers. Defaults to False.

        Example:
            >>> from choros.data import make_source
            >>> DataKind.of(make_source(iter([1])), read_ahead=True)
            DataKind(kind='stream', name='list_iterator', readers=0, read_ahead=True, augment=False)
        """
        augment = getattr(source, "augment", None) is not None
        if (dataset := py_dataset_of(source)) is not None:
            return cls("PyDataset", type(dataset.dataset).__name__, int(dataset.dataset.workers), augment=augment)
        if isinstance(source, StreamSource):
            modules = {parent.__module__.partition(".")[0] for parent in type(source.stream).__mro__}
            names = {parent.__name__ for parent in type(source.stream).__mro__}
            kind, readers = "stream", 0
            if "tensorflow" in modules and "DatasetV2" in names:
                kind = "tf.data.Dataset"
            elif "torch" in modules and "DataLoader" in names:
                kind, readers = "DataLoader", int(source.stream.num_workers)
            return cls(kind, type(source.stream).__name__, readers, read_ahead, augment)
        return cls("files" if isinstance(getattr(source, "inner", source), FileSource) else "arrays", augment=augment)


def _computing(worker: WorkerRecord) -> float:
    """Return the share of the training time in which steps did not wait for data."""
    return max(0.0, 1 - worker.waiting - (0.0 if worker.ahead else worker.copying))


def read_remedy(data: DataKind, worker: WorkerRecord) -> str:
    """Return the setting that shortens the waits for reading and decoding.

    Args:
        data: the kind of the data.
        worker: the record of the slowest worker.
    """
    reader_remedy = _reader_remedy(data, worker)
    if worker.ahead or data.read_ahead or data.kind == "PyDataset":  # these read ahead, or can by themselves
        return reader_remedy
    saved = min(worker.decoding, _computing(worker))
    prefetch = f"choros.prefetch reads the next batches while a step runs, which saves at most {saved:.0%} of the time"
    if saved > worker.decoding / 2:
        return prefetch
    return f"{reader_remedy}; {prefetch}" if saved >= _MIN_SAVED_SHARE else reader_remedy


def copy_remedy(worker: WorkerRecord) -> str:
    """Return the setting that shortens the waits for conversion and copies to the device.

    Args:
        worker: the record of the slowest worker.
    """
    if not worker.ahead:
        saved = min(worker.copying, _computing(worker))
        return f"choros.prefetch copies the next batches while a step runs, which saves at most {saved:.0%} of the time"
    return "data of 32 bits or fewer are not converted, and whole numbers of 8 bits are copied faster"


def _reader_remedy(data: DataKind, worker: WorkerRecord) -> str:
    """Return the setting by which batches are read faster."""
    readers = max(1, data.readers)
    overlapped = worker.ahead or data.read_ahead or data.readers > 1
    # Reading a batch takes r seconds, and a step s. If they overlap, a worker waits r - s seconds for a batch, else r.
    needed = (readers if overlapped else worker.decoding) / max(_computing(worker), 1e-3)
    count = min(_MAX_THREADS, max(readers + 1, math.ceil(needed - 1e-6)))
    if data.kind == "PyDataset":
        current = f" (it has {readers})" if data.readers > 1 else ""
        return (
            f"give {data.name} workers={count}{current} and as large a max_queue_size: so many threads of each worker "
            "then read ahead; threads do not help a __getitem__ of pure Python code, which must take less time"
        )
    if data.kind == "tf.data.Dataset":
        return (
            "give the map of the tf.data.Dataset num_parallel_calls=tf.data.AUTOTUNE, and end it with "
            ".prefetch(tf.data.AUTOTUNE)"
        )
    if data.kind == "DataLoader":
        current = f" (it has {data.readers})" if data.readers else ""
        return f"give the DataLoader num_workers={count}{current}: so many processes then read"
    if data.kind == "stream":
        cheaper = ", or a cheaper augment" if data.augment else ""
        return (
            f"one thread reads the {data.name}: give a keras.utils.PyDataset with workers={count} in its place, "
            f"or batches that take less work{cheaper}"
        )
    if data.augment:
        once = ", or do in choros.files(decode=) what is equal in each epoch" if data.kind == "files" else ""
        return f"make augment cheaper{once}; a free core (threads=) helps the thread that calls it"
    if data.kind == "files":
        return (
            "files are read and decoded in the first epoch only, by all workers: later epochs wait less; a cheaper "
            "decode=, more workers or a faster disk shortens the first"
        )
    return "give arrays in memory, or on a faster disk; a free core (threads=) helps the thread that reads"
