"""Files of Embedding layers for TensorBoard's projector, written without TensorFlow."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from choros.argument_checks import check_path, check_whole
from choros.errors import InvalidInputError
from choros.object_text import call_text


class TensorBoardEmbedding(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that writes the weights of Embedding layers, also in nested models, for TensorBoard's projector.

    Args:
        log_dir: str or path. TensorBoard's directory. Defaults to ``"logs"``.
        embeddings_freq: int. Epochs between two writes. Each write replaces the files. Defaults to 1.
        embeddings_layer_names: names of layers. Defaults to all Embedding layers.
        embeddings_metadata: a file with one line for each row of the embedding, or a dict from layer names to such
            files. Defaults to None.

    Raises:
        InvalidInputError: an argument has another type, or ``embeddings_freq`` is below 1; or, when training begins, a
            named layer or a metadata file does not exist.

    Example:
        >>> TensorBoardEmbedding("logs", embeddings_freq=5).embeddings_freq
        5
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        embeddings_freq: int = 1,
        embeddings_layer_names: Sequence[str] | None = None,
        embeddings_metadata: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        names, metadata = embeddings_layer_names, embeddings_metadata
        if names is not None and (isinstance(names, str | bytes) or not isinstance(names, Iterable)):
            raise InvalidInputError(f"embeddings_layer_names={names!r}: give a list of names of layers.")
        self.log_dir = Path(check_path("log_dir", log_dir))
        self.embeddings_freq = check_whole("embeddings_freq", embeddings_freq, 1, "epochs")
        if not (metadata is None or isinstance(metadata, Mapping)):
            check_path("embeddings_metadata", metadata)
        self.embeddings_layer_names, self.embeddings_metadata = embeddings_layer_names, embeddings_metadata

    def __repr__(self) -> str:
        return call_text(
            self,
            str(self.log_dir),
            embeddings_freq=self.embeddings_freq,
            embeddings_layer_names=self.embeddings_layer_names,
            embeddings_metadata=self.embeddings_metadata,
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the layers, and write the projector's configuration."""
        layers = [layer for layer in self.model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
        wanted = self.embeddings_layer_names
        self._layers = [layer for layer in layers if wanted is None or layer.name in wanted]
        if missing := set(wanted or ()) - {layer.name for layer in layers}:
            raise InvalidInputError(
                f"There is no Embedding layer {', '.join(map(repr, sorted(missing)))}: there are "
                f"{', '.join(repr(layer.name) for layer in layers) or 'none'}."
            )
        self.log_dir.mkdir(parents=True, exist_ok=True)
        lines = []
        for layer in self._layers:
            lines += ["embeddings {", f'  tensor_name: "{layer.name}"', f'  tensor_path: "{layer.name}.tsv"']
            metadata = self.embeddings_metadata
            path = metadata.get(layer.name) if isinstance(metadata, Mapping) else metadata
            if path is not None:
                if not os.path.isfile(path):
                    raise InvalidInputError(f"The metadata of {layer.name!r}, {path}, is not a file.")
                shutil.copy(path, self.log_dir / f"{layer.name}-metadata.tsv")
                lines.append(f'  metadata_path: "{layer.name}-metadata.tsv"')
            lines.append("}")
        (self.log_dir / "projector_config.pbtxt").write_text("\n".join(lines) + "\n")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the weights every ``embeddings_freq`` epochs."""
        if (epoch + 1) % self.embeddings_freq:
            return
        for layer in self._layers:
            weights = np.asarray(keras.ops.convert_to_numpy(layer.embeddings))
            np.savetxt(self.log_dir / f"{layer.name}.tsv", weights, fmt="%.6g", delimiter="\t")
