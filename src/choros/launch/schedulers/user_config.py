"""Settings of a user: ``~/.config/choros/config.toml`` and ``~/.config/choros/sites/NAME.toml`` (``XDG_CONFIG_HOME``).

``config.toml`` has one table, the defaults of ``choros submit``::

    [defaults]
    site = "mine"
    account = "MyProject"
    setup = ["module load python"]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from choros.errors import InvalidInputError, suggestion

_TEXTS = ("site", "on", "account", "queue", "filesystems", "time", "mpi", "python")
_LISTS = ("setup", "env", "directive")


def config_folder() -> Path:
    """Return the folder of the user's settings, which may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "choros"


def config_file() -> Path:
    """Return the file with the defaults of ``choros submit``, which may not exist."""
    return config_folder() / "config.toml"


def user_sites() -> dict[str, Path]:
    """Return the files of the user's sites by name."""
    return {file.stem: file for file in sorted(config_folder().joinpath("sites").glob("*.toml"))}


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        InvalidInputError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file} is not TOML: {error}") from None


def refuse_unknown(file: str, names: Collection[str], known: Collection[str], table: str = "") -> None:
    """Raise InvalidInputError, with file and key, for the first key that is not known."""
    for name in sorted(set(names) - set(known)):
        raise InvalidInputError(f"{file}: {table}{name} is unknown: {suggestion(name, sorted(known))}")


def submit_defaults() -> Mapping[str, str | list[str]]:
    """Return the user's defaults of ``choros submit``; an empty dict if there is no file.

    Raises:
        InvalidInputError: a key is unknown or has a value of another type; the message has the file and the key.
    """
    file = config_file()
    if not file.exists():
        return {}
    content = read_toml(file)
    refuse_unknown(str(file), content.keys(), ("defaults",))
    defaults = content.get("defaults", {})
    if not isinstance(defaults, dict):
        raise InvalidInputError(f"{file}: defaults must be a table, [defaults], got {defaults!r}")
    refuse_unknown(str(file), defaults.keys(), (*_TEXTS, *_LISTS), "[defaults] ")
    for name, value in defaults.items():
        if name in _TEXTS and not isinstance(value, str):
            raise InvalidInputError(f"{file}: [defaults] {name} must be a text in quotes, got {value!r}")
        if name in _LISTS and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise InvalidInputError(f"{file}: [defaults] {name} must be a list of texts, got {value!r}")
    return defaults
