"""Rules about the network: variables that name a wrong interface, names that cannot be resolved, a slow network."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from choros.tools.doctor.facts import Facts
from choros.tools.doctor.findings import ERROR, WARNING, Finding, Observations, Rule, alike, made

# Variables with names of interfaces; those of NCCL and RCCL have prefixes of names.
_BEGINNINGS = ("NCCL_SOCKET_IFNAME", "RCCL_SOCKET_IFNAME")
_NAMES = (
    *_BEGINNINGS,
    "CHOROS_NETWORK",
    "GLOO_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)
_LINK = 4.0  # factor to the usual bandwidth from which a link is slow
_SHARE = 0.02  # fraction of the fastest interface's speed that every library should reach


def named(variable: str, value: str, facts: Facts) -> list[dict[str, Any]] | None:
    """Return the interfaces that a variable selects on a rank's host.

    Args:
        variable: the name of the variable.
        value: its value: names, or networks such as ``10.0.0.0/8``, separated by commas.
        facts: the rank's facts.

    Returns:
        The interfaces; None if the value names devices of another kind, excludes interfaces, or selects all.

    Example:
        >>> host = {"interfaces": [{"name": "eth0", "addresses": ["10.0.0.1"]}], "fabrics": []}
        >>> [named("CHOROS_NETWORK", value, host) for value in ("10.0.0.0/8", "ib0")]
        [[{'name': 'eth0', 'addresses': ['10.0.0.1']}], []]
    """
    if value.startswith("^") or value.strip() in ("", "all"):
        return None
    beginnings = variable in _BEGINNINGS and not value.startswith("=")
    matches = []
    for prefix in (item.strip() for item in value.removeprefix("=").split(",")):
        name = prefix.partition(":")[0]
        if name in facts["fabrics"]:
            return None
        for interface in facts["interfaces"]:
            fits = interface["name"] == name or (beginnings and interface["name"].startswith(name))
            if fits or _within(prefix, interface["addresses"]):
                matches.append(interface)
    return matches


def _within(text: str, addresses: list[str]) -> bool:
    with suppress(ValueError):
        network = ipaddress.ip_network(text, strict=False)
        return any(ipaddress.ip_address(address) in network for address in addresses)
    return False


def interfaces(seen: Observations) -> Iterator[Finding]:
    """Find variables that name an interface that does not exist, is down, or is the loopback."""
    several = len(seen.machines()) > 1
    for variable in _NAMES:
        having = [facts for facts in seen.ranks if facts["network"].get(variable)]
        for (value, problem), some in alike(having, partial(_wrong, variable, several)):
            if problem:
                usable = ", ".join(
                    interface["name"]
                    for interface in some[0]["interfaces"]
                    if interface["up"] and not interface["loopback"]
                )
                yield made(
                    ERROR,
                    "interface",
                    some,
                    f"{{at}}: {variable}={value} {problem}.",
                    f"Set {variable} to one of {usable or 'none'} there (choros doctor lists them), or unset it.",
                )


def _wrong(variable: str, several: bool, facts: Facts) -> tuple[str, str]:
    """Return a variable's value, and a description of its error; "" if there is none."""
    value = facts["network"][variable]
    interfaces = named(variable, value, facts)
    if interfaces is None:
        return value, ""
    if not interfaces:
        return value, "names no interface of the host"
    if not any(interface["up"] and interface["addresses"] for interface in interfaces):
        return value, "names an interface that is down or has no address"
    alone = several and all(interface["loopback"] for interface in interfaces)
    return value, "names the loopback, which reaches no other host" if alone else ""


def names(seen: Observations) -> Iterator[Finding]:
    """Find names of hosts that cannot be resolved, or that resolve to the loopback."""
    several = len(seen.machines()) > 1
    for facts in (some[0] for some in seen.machines()):
        unknown = [name for name, addresses in facts["names"].items() if not addresses]
        if unknown:
            yield made(
                ERROR if several or len(facts["hosts"]) > 1 else WARNING,
                "host-name",
                [facts],
                f"{{at}}: {', '.join(unknown[:8])} cannot be looked up, and libraries that connect by name cannot "
                "start.",
                "Add it to /etc/hosts or the site's name service on every host, or correct the host's name.",
            )
    back = {facts["rank"]: _back(facts) for facts in (some[0] for some in seen.machines()) if several}
    some = [facts for facts in seen.ranks if back.get(facts["rank"])]
    if some:
        led = dict.fromkeys(address for facts in some for address in back[facts["rank"]])
        yield made(
            WARNING,
            "host-name",
            some,
            f"{{at}}: the host's own name leads to {', '.join([*led][:8])}, where no other host finds it. Choros takes "
            "the interface's address, but libraries that look their own name up (JAX's and PyTorch's gloo) do not.",
            "Write the network's address before the name in /etc/hosts, where Debian has 127.0.1.1; for PyTorch it is "
            "enough to name the interface (export GLOO_SOCKET_IFNAME=eth0).",
        )


def _back(facts: Facts) -> list[str]:
    """Return the addresses of a host's name if all are loopback addresses and the backend may resolve the name."""
    addresses: list[str] = facts["names"].get(facts["host"], [])
    named = any(facts["network"].get(variable) for variable in ("CHOROS_NETWORK", "GLOO_SOCKET_IFNAME"))
    if named and not facts["backend"].startswith("jax"):  # JAX reads no such variable
        return []
    return (
        addresses if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses) else []
    )


def rate(seen: Observations) -> Iterator[Finding]:
    """Find a network that is far slower than the interfaces of all hosts."""
    speeds = [_fastest(facts) for facts in seen.ranks]
    links = seen.measures.get("links", {})
    if not links or not all(speeds):
        return
    reached = statistics.median(links.values()) * 8
    if reached < _SHARE * min(speeds) * 1e6:
        yield made(
            WARNING,
            "slow-network",
            seen.ranks,
            f"{{at}}: the ranks communicate by a network that gives {reached * 1e-9:.2g} Gbit/s, where the hosts' "
            f"fastest interfaces have {min(speeds) / 1e3:g} Gbit/s.",
            "The traffic takes another interface: name the fast one (UCX_NET_DEVICES, FI_TCP_IFACE, "
            "OMPI_MCA_btl_tcp_if_include, NCCL_SOCKET_IFNAME), or load the MPI that is built for this network.",
        )


def links(seen: Observations) -> Iterator[Finding]:
    """Find hosts whose network is far slower than that of most others."""
    links: dict[int, float] = {int(rank): rate for rank, rate in seen.measures.get("links", {}).items()}
    if len(links) < 3:
        return  # with two hosts, the slow one is unknown
    usual = statistics.median(links.values())
    slow = [facts for facts in seen.ranks if facts["rank"] in links and links[facts["rank"]] * _LINK < usual]
    if slow:
        least = min(links[facts["rank"]] for facts in slow)
        yield made(
            ERROR,
            "slow-network",
            slow,
            f"{{at}}: the network gives {least * 8e-9:.2g} Gbit/s to the better neighbour, where most hosts have "
            f"{usual * 8e-9:.2g} Gbit/s.",
            "Look there at which interface the traffic takes (ip route, the variables in the report) and at its speed "
            "(ethtool, ibstatus); leave the host out until it is repaired.",
        )


def _fastest(facts: Facts) -> int:
    return max(
        (interface["speed"] for interface in facts["interfaces"] if interface["up"] and not interface["loopback"]),
        default=0,
    )


RULES: tuple[Rule, ...] = (interfaces, names, links, rate)
