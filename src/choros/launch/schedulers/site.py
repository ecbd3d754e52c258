"""Presets of clusters: one TOML file in ``presets/`` for each, which names its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from typing import Any

from choros.errors import InvalidInputError


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
        needs: dict. Directives without which the site refuses a job, and the advice for the error.
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
    """Return the names of all presets.

    Example:
        >>> "generic" in site_names()
        True
    """
    presets = resources.files("choros.launch.schedulers").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in presets if file.name.endswith(".toml")))


def load_site(name: str = "generic") -> Site:
    """Read the preset of a site.

    Args:
        name: one of ``site_names()``. Defaults to ``"generic"``, which assumes nothing.

    Raises:
        InvalidInputError: there is no such preset.

    Example:
        >>> load_site("perlmutter").gpu_order
        ('3', '2', '1', '0')
    """
    if name not in site_names():
        near = get_close_matches(name.lower(), site_names(), 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(site_names())}."
        raise InvalidInputError(f"there is no site {name!r}: {hint} Without --site no preset is used.")
    text = resources.files("choros.launch.schedulers").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return _read(tomllib.loads(text))


def _read(preset_file: dict[str, Any]) -> Site:
    unknown = preset_file.keys() - {field.name for field in fields(Site)}
    if unknown:
        raise InvalidInputError(
            f"the preset of {preset_file.get('name')} has unknown fields: {', '.join(sorted(unknown))}"
        )
    preset: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in preset_file.items()
    }
    return Site(**preset)
