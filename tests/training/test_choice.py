"""The group of a job's ranks, chosen by the environment."""

import pytest

from choros.cluster import Place
from choros.comm.bootstrap import select

SECRET = {"CHOROS_SECRET": 64 * "0"}


@pytest.mark.parametrize(
    ("installed", "environ", "kind"),
    [(True, SECRET, select.MPI), (False, SECRET, select.TCP), (False, {}, select.MPI)],
)
def test_ranks_of_srun_meet_by_sockets_where_mpi4py_is_not_installed_and_there_is_a_secret(
    installed, environ, kind, monkeypatch
):
    monkeypatch.setattr(select, "find_spec", lambda name: object() if installed else None)
    place = Place(rank=0, size=2, local_rank=0, local_size=2, node=0, nodes=1, launcher="slurm")
    assert select.choose(place, environ).kind == kind
