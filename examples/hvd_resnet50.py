"""ResNet-50 as it is trained on ImageNet: warm-up, a rate that falls in steps, checkpoints, and resuming from them.

    choros run -n 2 examples/hvd_resnet50.py
    choros run -n 2 examples/hvd_resnet50.py --out checkpoints --epochs 4      # resumes from the last checkpoint
    choros run -n 8 examples/hvd_resnet50.py --train-dir imagenet/train --val-dir imagenet/val --side 224 \\
        --batch-size 32 --classes 1000 --epochs 90 --warmup-epochs 5 --out checkpoints

By default the images are small and noise; JAX compiles for about a minute before the first step. To resume, rank 0
loads the newest checkpoint with the state of the optimizer, and sends the epoch and all variables to the other ranks.
"""

import argparse
import pathlib
import tempfile

import arguments
import images
import keras

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", type=arguments.application, default="ResNet50", help="a name in keras.applications")
parser.add_argument("--train-dir", type=arguments.folder, help="a directory of images for each class in it")
parser.add_argument("--val-dir", type=arguments.folder, help="likewise, for validation")
parser.add_argument("--out", type=pathlib.Path, help="where checkpoints are left and looked for; default: a new one")
parser.add_argument("--side", type=arguments.pixels, default=32, help="pixels; 224 for ImageNet")
parser.add_argument("--classes", type=arguments.count, default=10)
parser.add_argument("--batch-size", type=arguments.count, default=4, help="of each rank")
parser.add_argument("--steps", type=arguments.count, default=4, help="steps of an epoch of noise")
parser.add_argument("--epochs", type=arguments.count, default=2)
parser.add_argument("--warmup-epochs", type=arguments.number, default=1)
parser.add_argument("--rate", type=arguments.positive, default=0.0125, help="learning rate of one rank alone")
parser.add_argument("--fp16", action="store_true", help="round gradients to half precision")
options = parser.parse_args()

hvd.init()
compression = hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
rate = options.rate * hvd.size()

out = options.out or pathlib.Path(tempfile.mkdtemp())
found = {int(path.stem.split("-")[1]): path for path in out.glob("checkpoint-*.keras")} if hvd.rank() == 0 else {}
first = int(hvd.broadcast(max(found, default=0), root_rank=0, name="the epoch to go on from"))

if found:  # on rank 0 alone
    model = hvd.load_model(found[first], compression=compression)
else:
    make = getattr(keras.applications, options.model)
    shape = (options.side, options.side, 3)
    model = make(weights=None, input_shape=shape, classes=options.classes)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), compression=compression)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

if options.train_dir:
    data = images.Folders(options.train_dir, options.batch_size, options.side)
else:
    data = images.Synthetic(options.batch_size, options.side, options.classes, options.steps, hvd.rank())
validation = images.Folders(options.val_dir, options.batch_size, options.side) if options.val_dir else None

schedule = hvd.callbacks.LearningRateScheduleCallback
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup_epochs, verbose=1),
    schedule(rate, 1.0, start_epoch=int(options.warmup_epochs), end_epoch=options.epochs // 3),
    schedule(rate, lambda epoch: 1e-1, start_epoch=options.epochs // 3, end_epoch=2 * options.epochs // 3),
    schedule(rate, lambda epoch: 1e-2, start_epoch=2 * options.epochs // 3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(out / "checkpoint-{epoch}.keras"))

model.fit(
    data,
    shuffle=False,  # the data set does, alike on all ranks
    epochs=options.epochs,
    initial_epoch=first,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=callbacks,
    validation_data=validation,
)
if hvd.rank() == 0:
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    print(f"{model.name}: epochs {first + 1} to {options.epochs}, {steps} steps in all; checkpoints in {out}")
