"""The address of this host to which other hosts connect."""

from __future__ import annotations

import ipaddress
import socket

from choros.cluster.hardware.interfaces import default_route, interfaces
from choros.errors import InvalidInputError

LOOPBACK = "127.0.0.1"
# Variables whose value is a prefix: eth1 also selects eth10, =eth1 does not.
_PREFIXES: tuple[str, ...] = ("NCCL_SOCKET_IFNAME", "RCCL_SOCKET_IFNAME")
# Variables whose value is the name of one interface.
_NAMES: tuple[str, ...] = (
    "GLOO_SOCKET_IFNAME",
    "UCX_NET_DEVICES",  # UCX then uses only TCP over this interface, and no InfiniBand device
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)


def own_address(network: str = "") -> str:
    """Return the IPv4 address to which the other hosts of a job connect.

    Args:
        network: str. One of these: an interface (``eth0``); a prefix of the names of several interfaces (``hsn``), of
            which the first is used; a network (``10.0.0.0/16``); a domain (``.hsn.cm.example.org``), which is appended
            to this host's name and resolved; an address of this host. Defaults to "". It selects the address to which
            this host's name resolves, else that of the interface of the default route, else that of the first
            interface that is up.

    Raises:
        InvalidInputError: there is no such interface or name. For an interface, the message lists the interfaces.

    Example:
        >>> own_address("127.0.0.1"), own_address("lo")
        ('127.0.0.1', '127.0.0.1')
    """
    first_addresses = addresses()
    pairs = [(name, address) for name, interface_addresses in _active_interfaces() for address in interface_addresses]
    if network == LOOPBACK or any(network == address for _, address in pairs):
        return network
    if network.startswith("."):
        name = socket.gethostname().split(".")[0] + network
        return _look_up(name, f"network={network!r}")
    if network:
        matching = [address for name, address in pairs if name.startswith(network) or _within(address, network)]
        if not matching:
            known = ", ".join(f"{name} ({address})" for name, address in first_addresses.items())
            raise InvalidInputError(
                f"network={network!r}: {socket.gethostname()} has no such interface that is up with an address. It has "
                f"{known or 'none'}. Name one of them (CHOROS_NETWORK), or a domain such as .hsn.example.org."
            )
        return first_addresses.get(network, matching[0])
    outside = [address for _, address in pairs if not address.startswith("127.")]
    default = first_addresses.get(default_route(), (*outside, LOOPBACK)[0])
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = ""
    return resolved if resolved in outside else default


def host_and_port(place: str) -> tuple[str, int | None]:
    """Return the host and the port of ``host``, ``host:port``, ``[::1]:port`` or ``::1``; the port may be None.

    Raises:
        InvalidInputError: the port is not a number.

    Example:
        >>> host_and_port("n1:29500"), host_and_port("[fd00::1]:2222"), host_and_port("fd00::1")
        (('n1', 29500), ('fd00::1', 2222), ('fd00::1', None))
    """
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    elif place.count(":") > 1:  # an IPv6 address without a port
        host, port = place, ""
    else:
        host, _, port = place.partition(":")
    if port and not port.isdecimal():
        raise InvalidInputError(
            f"{place!r} has no port that is a number: give host:port, as n1:29500 or [fd00::1]:29500."
        )
    return host, int(port) if port else None


def address_of(host: str) -> str:
    """Return the address of this host to which a name resolves, or "" (all addresses) if it cannot be determined.

    Args:
        host: str. The name by which other hosts connect to this one.

    Example:
        >>> address_of("127.0.0.1"), address_of("no.such.host.invalid")
        ('127.0.0.1', '')
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    if address.startswith("127."):  # other hosts may resolve this name to another address
        return address if host == "localhost" or host.startswith("127.") else ""
    return address if address in addresses().values() else ""


def head_address(network: str, here: bool) -> str:
    """Return the address of this host, which starts a job, to which the hosts of the job connect.

    Args:
        network: str. As for ``own_address``.
        here: bool. Whether some of the ranks run on this host. If not, this host need not have the network: its
            default address is then returned.

    Raises:
        InvalidInputError: as for ``own_address``, if ``here`` is True.

    Example:
        >>> head_address("no_such_interface", here=False) == own_address()
        True
    """
    try:
        return own_address(network)
    except InvalidInputError:
        if here:
            raise
        return own_address()


def _within(address: str, network: str) -> bool:
    """Return whether an address is in a network such as ``10.0.0.0/16``."""
    try:
        return "/" in network and ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def pass_on(network: str) -> dict[str, str]:
    """Return the variables that make other libraries use a network: NCCL, Gloo, UCX, libfabric and Open MPI.

    Args:
        network: str. As for ``own_address``.

    Returns:
        Names and values. Empty for ``""``, for the loopback, or if no interface has the network's address.

    Example:
        >>> pass_on("lo"), pass_on("")
        ({}, {})
    """
    if not network:
        return {}
    address = own_address(network)
    if address.startswith("127."):  # some libraries refuse the loopback; ranks of one host do not need these variables
        return {}
    name = next((name for name, interface_addresses in _active_interfaces() if address in interface_addresses), "")
    return dict.fromkeys(_PREFIXES, f"={name}") | dict.fromkeys(_NAMES, name) if name else {}


def addresses() -> dict[str, str]:
    """Return the first IPv4 address of each interface that is up.

    Example:
        >>> addresses().get("lo", "127.0.0.1")
        '127.0.0.1'
    """
    return {name: interface_addresses[0] for name, interface_addresses in _active_interfaces() if interface_addresses}


def _active_interfaces() -> list[tuple[str, list[str]]]:
    """Return the name and the IPv4 addresses of each interface that is up."""
    return [
        (interface["name"], [a for a in interface["addresses"] if ":" not in a])
        for interface in interfaces()
        if interface["up"]
    ]


def _look_up(name: str, requested: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise InvalidInputError(
            f"{requested}: the name {name} cannot be looked up here ({error}). Give an interface instead."
        ) from None
