"""The command lines of keras_experiments, as three tasks on two nodes of a real SLURM."""

import os
import pathlib
import re
import shlex
import sys

# MPICH under pmi2, which a site sets in slurm.conf (MpiDefault) and in a module: the command lines stay as they are.
SITE = {"SLURM_MPI_TYPE": "pmi2", "MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_CH4_OFI_ENABLE_TAGGED": "0"}
PATH = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])


def test_each_command_line_runs_under_srun(slurm, old_command, old_scripts, old_launched):
    """``srun python`` is the interpreter of this test, and the data 60 pictures; no option is added."""
    line = old_launched(old_command, "srun python")
    assert not old_command.startswith("srun") or line == old_command
    environment = {"KERAS_HOME": str(old_scripts / "home"), "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    how = {**SITE, **environment, "PATH": PATH, "cwd": old_scripts, "timeout": 280}
    printed = slurm.run("salloc", "-N2", "-n3", "sh", "-c", line, **how)
    assert re.search(r"accuracy [\d.]+(, loss [\d.]+)? on \d+ images", printed), shlex.join([line, printed])
    if "_v2_" in line:
        assert len(set(re.findall(r"worker \d on (\S+): read 20 of 60 rows", printed))) == 2, printed
