"""On which of this host's addresses the others reach it."""

from __future__ import annotations

import ipaddress
import socket

from choros.errors import BadInput
from choros.machine.nics import default_route, interfaces

LOOPBACK = "127.0.0.1"
_TOLD = (
    "NCCL_SOCKET_IFNAME",
    "RCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)


def own_address(network: str = "") -> str:
    """Return the IPv4 address by which the other hosts of a job are to reach this one.

    Args:
        network: str. An interface (``eth0``) or the beginning of several's names (``hsn``), the first of which is
            taken; or a network (``10.0.0.0/16``); or a domain (``.hsn.cm.example.org``), which is appended to this
            host's name and looked up; or an address of this host. Defaults to "": the address of the host's own name,
            else that of the interface with the default route, else of the first that is up.

    Raises:
        BadInput: there is no such interface or name; says which interfaces there are.

    Example:
        >>> own_address("127.0.0.1"), own_address("lo")
        ('127.0.0.1', '127.0.0.1')
    """
    here = addresses()
    if network in here.values() or network == LOOPBACK:
        return network
    if network.startswith("."):
        name = socket.gethostname().split(".")[0] + network
        return _look_up(name, f"network={network!r}")
    if network:
        fitting = [address for name, address in here.items() if name.startswith(network) or _within(address, network)]
        if not fitting:
            known = ", ".join(f"{name} ({address})" for name, address in here.items())
            raise BadInput(
                f"network={network!r}: {socket.gethostname()} has no such interface that is up with an address, but "
                f"{known or 'none at all'}. Name one of them (CHOROS_NETWORK), or a domain as .hsn.example.org."
            )
        return here.get(network, fitting[0])
    outside = [address for address in here.values() if not address.startswith("127.")]
    first = here.get(default_route(), (*outside, LOOPBACK)[0])
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = ""
    return named if named in outside else first


def host_and_port(place: str) -> tuple[str, int | None]:
    """Return the host and the port, None where there is none, of ``host``, ``host:port``, ``[::1]:port`` or ``::1``.

    Raises:
        BadInput: the port is no number.

    Example:
        >>> host_and_port("n1:29500"), host_and_port("[fd00::1]:2222"), host_and_port("fd00::1")
        (('n1', 29500), ('fd00::1', 2222), ('fd00::1', None))
    """
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    elif place.count(":") > 1:  # an address of IPv6 alone
        host, port = place, ""
    else:
        host, _, port = place.partition(":")
    if port and not port.isdecimal():
        raise BadInput(f"{place!r} has no port that is a number: give host:port, as n1:29500 or [fd00::1]:29500.")
    return host, int(port) if port else None


def address_of(host: str) -> str:
    """Return the address of this host that a name leads others to; "" for all of them, where that cannot be told.

    Args:
        host: str. By which the others reach this host.

    Example:
        >>> address_of("127.0.0.1"), address_of("no.such.host.invalid")
        ('127.0.0.1', '')
    """
    try:
        found = socket.gethostbyname(host)
    except OSError:
        return ""
    if found.startswith("127."):  # this host's name may lead here on this host alone
        return found if host == "localhost" or host.startswith("127.") else ""
    return found if found in addresses().values() else ""


def head_address(network: str, here: bool) -> str:
    """Return the address by which a job's hosts are to reach this one, which starts the job.

    Args:
        network: str. As for ``own_address``.
        here: bool. Whether some of the ranks run here. If not, only the job's hosts need to have that network: where
            this one has not, the usual way leads here.

    Raises:
        BadInput: as ``own_address``.

    Example:
        >>> head_address("no_such_interface", here=False) == own_address()
        True
    """
    try:
        return own_address(network)
    except BadInput:
        if here:
            raise
        return own_address()


def _within(address: str, network: str) -> bool:
    """Return whether an address is in a network as ``10.0.0.0/16``."""
    try:
        return "/" in network and ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def pass_on(network: str) -> dict[str, str]:
    """Return the variables by which other libraries are told the same network: NCCL, gloo, UCX, libfabric, Open MPI.

    Args:
        network: str. As for ``own_address``.

    Returns:
        Names and values; none for ``""``, for the loopback, or where no interface has the address that it means.

    Example:
        >>> pass_on("lo"), pass_on("")
        ({}, {})
    """
    if not network:
        return {}
    address = own_address(network)
    near = address.startswith("127.")  # the others may refuse it: on one host they need no network
    name = "" if near else next((name for name, found in addresses().items() if found == address), "")
    return dict.fromkeys(_TOLD, name) if name else {}


def addresses() -> dict[str, str]:
    """Return the first IPv4 address of each interface that is up.

    Example:
        >>> addresses().get("lo", "127.0.0.1")
        '127.0.0.1'
    """
    up = {each["name"]: [a for a in each["addresses"] if ":" not in a] for each in interfaces() if each["up"]}
    return {name: found[0] for name, found in up.items() if found}


def _look_up(name: str, asked: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise BadInput(f"{asked}: the name {name} is not known here ({error}). Give an interface instead.") from None
