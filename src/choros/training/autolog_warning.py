"""The warning that MLflow's autologging does not see a ``Trainer``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

from choros.errors import warn


def warn_of_autologging(callbacks: Iterable[object]) -> None:
    """Warn once in a process if ``mlflow.keras.autolog()`` is on and no callback of MLflow is given.

    MLflow replaces ``keras.Model.fit``, which a ``Trainer`` does not call.

    Args:
        callbacks: those given to ``fit``.
    """
    # MLflow is not imported here: a script that uses it has imported it.
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    if autologging is None or autologging.autologging_is_disabled("keras"):
        return
    if not any(type(callback).__module__.partition(".")[0] == "mlflow" for callback in callbacks):
        _warn()


@cache
def _warn() -> None:
    warn(
        "mlflow.keras.autolog() logs nothing of a Trainer, which does not call keras.Model.fit: give fit "
        "callbacks=[mlflow.keras.MlflowCallback()] within mlflow.start_run()."
    )
