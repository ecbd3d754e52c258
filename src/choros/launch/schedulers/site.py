"""Sites: presets of clusters in ``presets/``, one TOML file for each with its source, and the user's files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from choros.errors import InvalidInputError, suggestion
from choros.launch.schedulers.option_names import named
from choros.launch.schedulers.user_config import read_toml, refuse_unknown, user_sites


@dataclass(frozen=True)
class Site:
    """A cluster: the facts on which a job's script depends. All have defaults.

    Attributes:
        name: str. The cluster's name.
        source: tuple of str. The source of these facts, with the date.
        scheduler: str. A name of ``SCHEDULERS``.
        mpi: str. The default of ``Job.mpi``.
        ranks_per_node, cores, gpus: int. The defaults of a job; the last two for each rank.
        gpus_per_node, cores_per_node: int. The number on one node; 0 if unknown.
        cpus_per_core: int. The number of CPUs that SLURM counts for a core. Defaults to 1.
        select: str. The chunk for PBS' ``-l``, with ``{nodes}``.
        queue_option: str. SLURM's option that names a queue. Defaults to ``--partition``.
        gpu_directives: tuple of str. The request for GPUs, instead of the scheduler's usual option; ``{gpus}`` is the
            number for each rank. A site that names all GPUs of a node allocates whole nodes.
        directives: tuple of str. More directives, as after ``#SBATCH`` or ``#PBS``.
        launch: tuple of str. More options of srun or mpiexec.
        bind: dict. The launcher's options that bind ranks, by ranks per node; ``other`` for all other numbers.
        visible: str. The variable that limits a rank to its GPUs; "" leaves this to the scheduler.
        gpu_order: tuple of str. The GPUs in the order of local ranks.
        needs: dict. Directives without which the site refuses a job, and the advice for the error, which may have
            ``--filesystems NAMES``.
        needs_account: bool. Whether a job must name an account. Defaults to False.
        environment: dict. Variables to export.

    Example:
        >>> load_site("polaris").scheduler
        'pbs'
    """

    name: str = "generic"
    source: tuple[str, ...] = ()
    scheduler: str = ""
    mpi: str = ""
    ranks_per_node: int = 1
    cores: int = 1
    gpus: int = 0
    gpus_per_node: int = 0
    cores_per_node: int = 0
    cpus_per_core: int = 1
    select: str = ""
    queue_option: str = "--partition"
    gpu_directives: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    bind: Mapping[str, str] = field(default_factory=dict)
    visible: str = "CUDA_VISIBLE_DEVICES"
    gpu_order: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    needs_account: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def site_names() -> tuple[str, ...]:
    """Return the names of all presets and of the user's sites.

    Example:
        >>> "generic" in site_names()
        True
    """
    return tuple(sorted({*presets(), *user_sites()}))


def presets() -> tuple[str, ...]:
    """Return the names of all presets.

    Example:
        >>> "polaris" in presets()
        True
    """
    files = resources.files("choros.launch.schedulers").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_site(name: str = "generic") -> Site:
    """Read the file of a site.

    Args:
        name: one of ``site_names()``, or the path of a file that ends in ``.toml``. A site of the user comes before a
            preset of the same name. Defaults to ``"generic"``, which assumes nothing.

    Raises:
        InvalidInputError: there is no such site, or a key of its file is unknown or has a value of another type.

    Example:
        >>> load_site("perlmutter").gpu_order
        ('3', '2', '1', '0')
    """
    file = Path(name).expanduser() if name.endswith(".toml") else user_sites().get(name)
    if file is not None:
        return _read(str(file), {"name": file.stem, **read_toml(file)})
    if name not in presets():
        hint = suggestion(name, site_names())
        end = "" if hint.endswith("?") else "."
        raise InvalidInputError(f"there is no site {name!r}: {hint}{end} Without {named('site')} no preset is used.")
    text = resources.files("choros.launch.schedulers").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return _read(f"the preset {name}.toml", tomllib.loads(text))


def _read(file: str, content: dict[str, Any]) -> Site:
    """Return the site of a file's content; refuse unknown keys and values of another type."""
    kinds = {field.name: _kind_of(field) for field in fields(Site)}
    refuse_unknown(file, content.keys(), kinds)
    for name, value in content.items():
        kind, text = kinds[name]
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if type(value) is not kind or not all(isinstance(item, str) for item in items):
            raise InvalidInputError(f"{file}: {name} must be {text}, got {value!r}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    return Site(**values)


def _kind_of(field: Field[Any]) -> tuple[type, str]:
    """Return the type of a key's value in TOML, and its description."""
    if field.default is MISSING:
        return dict, "a table of texts"
    return {
        bool: (bool, "true or false"),
        int: (int, "a whole number"),
        str: (str, "a text in quotes"),
        tuple: (list, "a list of texts"),
    }[type(field.default)]
