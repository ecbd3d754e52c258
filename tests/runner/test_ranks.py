"""The environment of a job's ranks, calculated without starting any."""

import platform

import pytest

import choros
from choros.errors import InvalidInputError
from choros.launch.horovod_options import OPTIONS, answers
from choros.launch.local_job import horovod_variables, size_of


def test_how_many(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=2\n127.0.0.1 slots=3\n")
    assert size_of(None, None, None) is None
    assert size_of(7, None, None) == 7
    assert size_of(None, f"{platform.node()}:3,localhost:1", None) == 4
    assert size_of(None, None, str(path)) == 5
    assert size_of(4, None, str(path)) == 4


@pytest.mark.parametrize(
    ("requested", "hosts", "hostfile", "message"),
    [
        (3, "localhost:2", None, "3 ranks were asked for, but the hosts have 2 slots"),
        (2, "localhost:1", None, "have 1 slot$"),
        (None, "localhost:2,n2:2", None, r"n2 is not this machine \(.*\), and only the command `choros run`"),
        (None, "localhost", None, "host:slots"),
        (None, "localhost:2", "hosts", "not both"),
        (None, None, "no/such/file", "cannot be read"),
    ],
)
def test_hosts_that_cannot_be_used(requested, hosts, hostfile, message):
    with pytest.raises(InvalidInputError, match=message):
        size_of(requested, hosts, hostfile)


def test_horovods_variables():
    assert horovod_variables() == {}
    warnings_ = horovod_variables(
        start_timeout=2.5, timeline="t.json", mark_cycles=False, stall_off=True, stall_warning=1234567, stall_shutdown=0
    )
    assert warnings_ == {
        "HOROVOD_START_TIMEOUT": "2.5",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1234567",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
    }


def test_every_other_option_has_one_answer():
    names = [name for option in OPTIONS for name in option.names]
    assert len(set(names)) == len(names)
    for option in OPTIONS:
        for name in option.names:
            if option.refused:
                with pytest.raises(
                    InvalidInputError, match=f"^{name} is an option of horovodrun that Choros does not have: "
                ):
                    option.answer(name)
            else:
                assert option.answer(name).startswith(f"{name} is ignored: ")


def test_keywords_of_horovods_run():
    none = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "mpi_args", "min_np", "max_np")
    assert answers(dict.fromkeys(none)) == []
    inputs = {"use_gloo": True, "use_mpi": False, "ssh_port": 22, "ssh_identity_file": None, "network_interface": "lo"}
    assert [line.split(" is ignored: ")[0] for line in answers(inputs)] == ["use_gloo", "ssh_port", "network_interface"]
    for name in none:
        with pytest.raises(InvalidInputError, match=f"^{name} is an option"):
            answers({name: 1})
    with pytest.raises(TypeError, match="no keyword 'num_procs'"):
        answers({"num_procs": None})
    with pytest.raises(TypeError, match=r"no keyword 'zzz'$"):
        answers({"zzz": None}, ["num_proc"])
    with pytest.raises(TypeError, match="no keyword 'nproc': did you mean 'num_proc'"):
        choros.run(len, nproc=2)
