import platform

import pytest

from choros.cluster import is_this_machine, parse_slots, read_hostfile
from choros.errors import InvalidInputError
from choros.launch.specs import Ssh


def test_hosts_with_slots():
    assert parse_slots("n1:4, gpu-a.site.org:12,10.0.0.7:1") == (("n1", 4), ("gpu-a.site.org", 12), ("10.0.0.7", 1))


def test_a_host_that_is_there_twice_has_the_slots_of_both(tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=2\nn1 slots=3\n")
    assert read_hostfile(str(tmp_path / "hosts")) == (("n1", 4), ("n2", 2))
    assert parse_slots("n1:1,n2:2,n1:1") == (("n1", 2), ("n2", 2))
    assert Ssh("n1:1,n1:1").size() == 2


@pytest.mark.parametrize(
    "text", ["", "n1", "n1:", ":2", "n1:0", "n1:-1", "n1:2,", "n1:2 n2:2", "n1:two", "n1:2:3", ["n1:2"]]
)
def test_hosts_of_another_form(text):
    with pytest.raises(InvalidInputError, match="host:slots"):
        parse_slots(text)
    if text:
        with pytest.raises(InvalidInputError, match="host:slots"):
            Ssh(text)


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\n\nn1 slots=4\n  n2.site  slots = 2   # half of it\n\n")
    assert read_hostfile(str(path)) == (("n1", 4), ("n2.site", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1 slots=4\nn2\n", "line 2 .* is 'n2', not of the form: host slots=n"),
        ("n1 slots=4 max_slots=8\n", "line 1 "),
        ("n1:4\n", "line 1 "),
        ("n1 slots=0\n", "line 1 "),
        ("# nobody\n", "names no host"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_host_files_of_another_form(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInputError, match=message):
        read_hostfile(str(path))


def test_host_files_that_are_not_there(tmp_path):
    with pytest.raises(InvalidInputError, match=r"none cannot be read: No such file"):
        read_hostfile(str(tmp_path / "none"))


def test_names_of_this_machine(monkeypatch):
    for name in ("localhost", "LOCALHOST", "127.0.0.1", platform.node()):
        assert is_this_machine(name)
    monkeypatch.setattr(platform, "node", lambda: "Login1.Site.org")
    assert is_this_machine("login1")
    assert is_this_machine("login1.site.org")
    assert not is_this_machine("login1.other.org")
    monkeypatch.setattr(platform, "node", lambda: "n7")
    monkeypatch.setattr("socket.getfqdn", lambda: "n7.site.org")
    assert is_this_machine("n7.site.org")
    assert not is_this_machine("n7.other.org")
    assert not is_this_machine("n70")
    assert not is_this_machine("n")
