"""A rank that raises under a bare srun, by MPI and by sockets: the step ends at once, on both nodes."""

import re
import secrets
import sys

import pytest


@pytest.mark.parametrize("how", ["script", "callback", "trainer"])
def test_ranks_that_meet_by_mpi(slurm, failing, how):
    failing(["srun", "--mpi=pmi2", "-N2", "-n2", sys.executable], how, **slurm.environment)


@pytest.mark.parametrize("how", ["callback", "trainer"])
def test_ranks_that_meet_by_sockets(slurm, failing, how):
    """srun leaves the others alone, for as long as they run."""
    facts = {"CHOROS_COMM": "tcp", "CHOROS_SECRET": secrets.token_hex(32), **slurm.environment}
    end = failing(["srun", "--mpi=none", "-N2", "-n2", sys.executable], how, **facts)
    for rank in range(2):
        assert re.search(rf"srun: error: n\d: task {rank}: Exited with exit code 1", end), end
