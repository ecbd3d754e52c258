"""The settings of a trial of ``choros tune``, which its ranks read from a variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

TUNE = "CHOROS_TUNE"  # environment variable with the settings
SEEN = ".seen"  # after the path of the result: the file with the numbers of fits and steps of a script that ended


@dataclass(frozen=True)
class TuneSettings:
    """The measured steps of a trial.

    Attributes:
        warmup: int. Steps before the measurement, which compile.
        steps: int. Measured steps.
        path: str. The file for the result.
        plain: bool. Whether ``choros.Trainer.fit`` is ``model.fit`` of Keras, in the process of the script.

    Example:
        >>> TuneSettings.of(TuneSettings(3, 10, "result").text()).steps
        10
    """

    warmup: int
    steps: int
    path: str = ""
    plain: bool = False

    def text(self) -> str:
        """Return the settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> TuneSettings:
        """Return the settings from the result of ``text``."""
        return cls(**json.loads(text))
