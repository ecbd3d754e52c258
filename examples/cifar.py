"""What the CIFAR-10 examples share: their options, their data and a network; not an example.

The pictures are read from Keras' folder (``~/.keras/datasets``, or ``$KERAS_HOME/datasets``). ``--download`` fetches
them to this folder. ``--data`` names an .npz file with x_train, y_train, x_test and y_test, ``--datadir`` another
folder. ``--synthetic`` generates pictures: each class is a color with stripes and noise. Accuracies on them show that
training works, and nothing about the quality of a network.
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import pickle
import sys
import tarfile

import arguments
import keras
import numpy as np

import choros
from choros.parallel import logical_devices, make_parallel

PARTS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
FOLDERS = ["cifar-10-batches-py-target/cifar-10-batches-py", "cifar-10-batches-py"]  # of Keras 3 and of Keras 2
ARCHIVES = ["cifar-10-batches-py-target_archive", "cifar-10-batches-py.tar.gz", "cifar-10-python.tar.gz"]
UNUSED = ("enqueue", "syncopt", "nccl")  # choices of keras_experiments' scripts that Choros makes
PLACE = choros.Place.here()


def parser(doc, batch="of all devices together", batch_size=64, checkpt=True):
    """Return a parser with the options of all CIFAR-10 examples.

    Args:
        doc: the docstring of the example; its first line is the description.
        batch: what ``batch_size`` rows are.
        batch_size: the default.
        checkpt: whether there are ``--checkpt`` and ``--aug``.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--data", type=arguments.file, help="an .npz file of CIFAR-10, instead of Keras' folder")
    made.add_argument(
        "--datadir", type=arguments.folder, help="a folder with cifar-10-batches-py, instead of Keras' folder"
    )
    made.add_argument("--download", action="store_true", help="download CIFAR-10 to Keras' folder if it is not there")
    made.add_argument("--synthetic", action="store_true", help="make pictures up")
    made.add_argument("--epochs", type=arguments.count, default=3)
    made.add_argument("--batch_size", type=arguments.count, default=batch_size, help=batch)
    if checkpt:
        name = pathlib.Path(sys.argv[0]).stem + ".keras"
        text = f"load the weights of this file if it exists, and save the best model in it; without a name {name}"
        made.add_argument("--checkpt", nargs="?", const=name, help=text)
        made.add_argument("--aug", action="store_true", help="shift and flip the pictures")
    for name in UNUSED:
        made.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return made


def add_mgpu(made):
    """Add ``--mgpu`` and ``--logdevp``."""
    text = "devices of this process, or of each rank of a job; without a number all (in a job 1 for each rank)"
    made.add_argument("--mgpu", type=arguments.devices, nargs="?", const=-1, default=1, help=text)
    made.add_argument(
        "--logdevp", action="store_true", help="print the device of each variable and of each part of a batch"
    )


def add_workers(made, algorithm="adag"):
    """Add ``--algorithm``, ``--workers``, ``--network`` and ``--rdma``."""
    text = "one of " + ", ".join(map(str.lower, choros.algorithms()))
    made.add_argument("--algorithm", type=arguments.algorithm, default=algorithm, help=text)
    made.add_argument("--workers", type=arguments.count, help="defaults to the ranks of the job; without a job to 2")
    made.add_argument("--network", help="the interface, or the domain, between the hosts: ib0, .ib.cluster")
    text = "use InfiniBand's interface between the hosts, if there is one; verbs and gdr are taken for the same"
    made.add_argument("--rdma", nargs="?", const="verbs", help=text)


def parse(made):
    """Return the options of the command line.

    A CPU is divided here, where ``--mgpu`` has a number: later it is too late.
    """
    options = made.parse_args()
    if getattr(options, "checkpt", None) and not options.checkpt.endswith(".keras"):
        made.error(f"--checkpt {options.checkpt}: Keras 3 saves models as NAME.keras: give such a name, or none")
    if options.download and (options.data or options.datadir):
        made.error("--download fills Keras' folder: leave --data and --datadir out")
    if getattr(options, "mgpu", 1) > 1:
        logical_devices(options.mgpu)
    if without_effect := [f"--{name}" for name in UNUSED if getattr(options, name)]:
        say(f"{', '.join(without_effect)}: no effect, as batches are always read ahead and gradients always added up")
    if getattr(options, "rdma", None) and not options.network:
        options.network = infiniband()
        state = f"the network is {options.network}" if options.network else "there is no interface of InfiniBand"
        say(f"--rdma: {state}; --network names another")
    return options


def infiniband(folder="/sys/class/net"):
    """Return the first interface of InfiniBand or Slingshot that is up, or None."""
    for interface in sorted(pathlib.Path(folder).glob("*")):
        if interface.name.startswith(("ib", "hsn")) and (interface / "operstate").read_text().strip() == "up":
            return interface.name
    return None


def say(*words):
    """Print on rank 0 only."""
    if not PLACE.rank:
        print(*words, flush=True)


def keras_folder():
    """Return the folder in which Keras keeps data sets."""
    return pathlib.Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "datasets"


def load(options):
    """Return (pictures, labels) to train on and to test on: float32 of 32 x 32 x 3 in 0..1, and integers.

    Raises:
        SystemExit: there are no data; the message says what to do.
    """
    if options.download:
        download(keras_folder())
    return rows_of(options)


def rows_of(options):
    """Return the rows that ``load`` returns, without a download."""
    if options.synthetic:
        say("made-up pictures: the figures show that training works, not how good the network is")
        return striped(1024, 1), striped(256, 2)
    if options.data:
        with np.load(options.data) as file:
            x, y, x_test, y_test = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
        return ready(x, y), ready(x_test, y_test)
    folder = pathlib.Path(options.datadir or keras_folder())
    place = find(folder)
    if place is None:
        raise SystemExit(
            f"CIFAR-10 is not in {folder}. Give --download on a machine with internet access, --data FILE.npz, "
            "--datadir FOLDER (with cifar-10-batches-py in it), or --synthetic for made-up pictures."
        )
    return read(place)


def download(folder):
    """Let Keras download CIFAR-10; one rank of a job does it, the others find what it left."""
    with choros.rank_zero_first():
        if find(folder) is None:  # Keras would unpack the archive again, while other ranks read
            try:
                keras.datasets.cifar10.load_data()
            except Exception as error:  # Keras raises plain exceptions here
                raise SystemExit(
                    f"CIFAR-10 could not be downloaded: {error}. Download it on a machine with internet access, and "
                    f"copy ~/.keras/datasets of that machine to {folder}."
                ) from error


def find(folder):
    """Return the folder with CIFAR-10's files, else the archive of them, else None."""
    for name in FOLDERS:
        if all((folder / name / part).is_file() for part in PARTS):
            return folder / name
    return next((folder / name for name in ARCHIVES if (folder / name).is_file()), None)


def read(place):
    """Return the data in a folder, or in an archive, as ``load`` does.

    The files are pickles, and a pickle can run code: ``--datadir`` must be a folder that you trust. Keras reads its own
    folder in the same way.
    """
    rows = []
    try:
        with contextlib.ExitStack() as stack:
            archive = stack.enter_context(tarfile.open(place)) if place.is_file() else None
            for name in PARTS:
                file = archive.extractfile(f"cifar-10-batches-py/{name}") if archive else (place / name).open("rb")
                part = pickle.load(stack.enter_context(file), encoding="bytes")
                rows.append((part[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), part[b"labels"]))
    except (OSError, EOFError, KeyError, tarfile.TarError, pickle.UnpicklingError) as error:
        raise SystemExit(
            f"{place} cannot be read ({error!r}). Its download may have been cut short: remove it and give --download."
        ) from error
    x, y = (np.concatenate(columns) for columns in zip(*rows[:-1], strict=True))
    return ready(x, y), ready(*rows[-1])


def ready(x, y):
    """Return pictures of bytes, and labels, in the form of ``load``."""
    return np.asarray(x, "float32") / 255, np.ravel(y).astype("int64")


def striped(count, seed):
    """Return made-up pictures and their labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, count)
    colours = np.random.default_rng(0).random((10, 1, 1, 3))
    stripes = np.stack([(np.arange(32) // (number % 5 + 1)) % 2 for number in range(10)])[:, None, :, None]
    x = (colours * (0.5 + 0.5 * stripes))[y] * np.ones((1, 32, 1, 1)) + rng.normal(0, 0.3, (count, 32, 32, 3))
    return x.astype("float32"), y


def mapped(options):
    """Return the data of ``load``; those to train on are mapped files, of which a process reads only rows that it uses.

    Rank 0 writes the files once, next to Keras' data sets (``--maps`` names another folder). Ranks of hosts that share
    this folder map the same files.
    """
    if options.download:
        download(keras_folder())  # not in the block below: blocks in which rank 0 goes first do not nest
    source = None if options.synthetic else options.data or find(pathlib.Path(options.datadir or keras_folder()))
    written = os.stat(source).st_mtime if source else 0.0
    kind = "synthetic" if options.synthetic else hashlib.sha256(str(source).encode()).hexdigest()[:16]
    folder = pathlib.Path(options.maps or keras_folder() / "cifar10-maps") / kind
    names = ["x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"]
    with choros.rank_zero_first():
        if not all((folder / name).is_file() and (folder / name).stat().st_mtime >= written for name in names):
            (x, y), (x_test, y_test) = rows_of(options)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for name, array in zip(names, (x, y, x_test, y_test), strict=True):
                    part = folder / f"{name}.{os.uname().nodename}.{os.getpid()}"
                    with part.open("wb") as file:
                        np.save(file, array)
                    part.replace(folder / name)  # ranks of another host may write the same file
            except OSError as error:
                raise SystemExit(f"{error}. Give --maps FOLDER, where this job may write.") from error
    x, y, x_test, y_test = (np.load(folder / name, mmap_mode="r") for name in names)
    return (x, y), (x_test, y_test)


def network():
    """Return Keras' old example for such pictures: a convolutional network of 1.25 million weights."""
    layers = keras.layers
    parts = [keras.Input((32, 32, 3))]
    for filters in (32, 64):
        parts += [
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
        ]
    parts += [layers.Flatten(), layers.Dense(512, "relu"), layers.Dropout(0.5), layers.Dense(10, "softmax")]
    return keras.Sequential(parts)


def changes(seed=None):
    """Return the random layers of ``--aug``."""
    layers = keras.layers
    return [layers.RandomFlip("horizontal", seed=seed), layers.RandomTranslation(0.1, 0.1, seed=seed)]


def load_weights(options, model):
    """Set the trained weights of the file of ``--checkpt``, where it exists; return whether it does.

    The random layers of ``--aug`` have no such weights, so the file may be of a run with or without them.
    """
    if not options.checkpt or not os.path.exists(options.checkpt):
        return False
    saved = keras.models.load_model(options.checkpt, compile=False)
    try:
        for variable, value in zip(model.trainable_variables, saved.trainable_variables, strict=True):
            variable.assign(value)
    except ValueError as error:
        raise SystemExit(
            f"{options.checkpt} is of another network: remove it, or give --checkpt another name"
        ) from error
    say(f"the weights of {options.checkpt} are loaded")
    return True


def checkpoints(options):
    """Return the list of callbacks that ``--checkpt`` asks for; of a job's ranks only rank 0 writes."""
    if not options.checkpt or PLACE.rank:
        return []
    return [keras.callbacks.ModelCheckpoint(options.checkpt, save_best_only=True, monitor="val_loss")]


def over_devices(model, count, algorithm="allreduce"):
    """Return what trains a compiled model over devices of this process, or as a rank of a job over those of all ranks.

    Args:
        model: a compiled model.
        count: devices of this process; -1 for all.
        algorithm: of the ranks of a job.
    """
    if PLACE.size > 1:
        return choros.Trainer(model, algorithm, devices_per_worker=max(count, 1))
    parallel = make_parallel(model, count)
    return choros.Trainer(model, "single") if parallel is model else parallel


def trainer(model, options, devices_per_worker=1):
    """Return a Trainer of ``--workers`` workers; in a job the ranks are the workers."""
    workers = options.workers or (None if PLACE.size > 1 else 2)
    how = {"devices_per_worker": devices_per_worker, "network": options.network}
    return choros.Trainer(model, options.algorithm, workers, **how)


def report(model, test):
    """Evaluate; print loss and accuracy on rank 0; return the loss."""
    loss, accuracy = model.evaluate(*test, verbose=0)
    say(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
    return loss


def check(options, loss, limit, epochs):
    """End with an error where made-up pictures were not learned in so many epochs."""
    if options.synthetic and options.epochs >= epochs and loss >= limit:
        raise SystemExit(f"the loss of made-up pictures should have fallen below {limit} in {epochs} epochs")
