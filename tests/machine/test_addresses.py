"""Addresses belong to the interface that has them, on clouds, on hosts with several network cards and with aliases."""

import pytest

from choros.cluster.hardware import interfaces, network_address
from choros.cluster.hardware.network_address import addresses, own_address, pass_on

HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Make the kernel tell of these interfaces, routes and addresses; ``primary`` has the answers of its sockets."""

    def has(names, routes, local, primary=None):
        net, proc = tmp_path / "net", tmp_path / "proc"
        for number, name in enumerate(["lo", *names]):
            (net / name).mkdir(parents=True)
            (net / name / "flags").write_text("0x1003" if number else "0x9")
        proc.mkdir()
        rows = ["\t".join([name, target, via, "1", "0", "0", "0", mask]) for name, target, via, mask in routes]
        (proc / "route").write_text(HEADER + "\n".join(rows) + "\n")
        entries = [f"     |-- {each}\n        /32 host LOCAL\n" for each in [*local, "127.0.0.1"]]
        (proc / "fib_trie").write_text("Main:\n" + "".join(entries))
        inputs = {} if primary is None else {"primary": {"lo": "127.0.0.1", **primary}.get}
        monkeypatch.setattr(network_address, "interfaces", lambda: interfaces.interfaces(net, proc, **inputs))
        monkeypatch.setattr(network_address, "default_route", lambda: interfaces.default_route(proc))
        monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")

    return has


def test_an_address_without_a_network_is_that_of_the_default_route(host):
    # Google Compute Engine: eth0 has 10.128.0.5/32, the gateway 10.128.0.1 has a route of its own
    routes = [("eth0", "00000000", "0100800A", "00000000"), ("eth0", "0100800A", "00000000", "FFFFFFFF")]
    host(["docker0", "eth0"], [*routes, ("docker0", "000011AC", "00000000", "0000FFFF")], ["10.128.0.5", "172.17.0.1"])
    assert addresses() == {"lo": "127.0.0.1", "eth0": "10.128.0.5", "docker0": "172.17.0.1"}
    assert own_address() == own_address("eth0") == "10.128.0.5"


def test_cards_on_the_same_network_each_have_their_own_address(host):
    cards = {f"hsn{number}": f"10.1.0.{number + 1}" for number in range(4)}
    routes = [(name, "0000010A", "00000000", "0000FFFF") for name in cards]
    host(cards, routes, cards.values(), primary=cards)
    assert addresses() == {"lo": "127.0.0.1", **cards}
    assert own_address("hsn0") == "10.1.0.1"
    assert pass_on("hsn2")["GLOO_SOCKET_IFNAME"] == "hsn2"


def test_the_second_address_of_an_interface_is_one_of_this_host(host):
    routes = [("eth0", "0000000A", "00000000", "00FFFFFF"), ("eth0", "0001000A", "00000000", "00FFFFFF")]
    host(["eth0"], routes, ["10.0.0.7", "10.0.1.7"])
    assert own_address("10.0.1.7") == own_address("10.0.1.0/24") == "10.0.1.7"
    assert own_address("eth0") == addresses()["eth0"] == "10.0.0.7"
    assert pass_on("10.0.1.0/24")["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_the_kernel_tells_the_address_of_the_loopback():
    assert interfaces.primary_address("lo") == "127.0.0.1"
    assert interfaces.primary_address("no.such.interface.at.all") is None
